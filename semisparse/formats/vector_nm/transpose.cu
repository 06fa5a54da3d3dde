// x [m, k] in 16 bits by columns: zeros past k and m, so that nothing that follows needs tests.
//
// A block turns a tile of TOKENS x 64 columns by matrix loads, whose rows may be any: those of matrix i are the tokens 2 i and
// 2 i + 1 of each eight, so that a lane gets eight consecutive tokens of one column and stores them at once.
//
// Compiled for TOKENS (a multiple of 32).

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = 64;
constexpr int kUnits = kColumns / 8;  // of 16 bytes in a token's columns
constexpr int kTurns = TOKENS * kUnits / kThreads;

// Where a token's unit stands in shared memory: the eight rows of a matrix in eight groups of banks, and the units of a row.
__device__ __forceinline__ int place(int token, int unit) {
    return token * kUnits + (unit ^ ((token & 1) | (token >> 3 & 3) << 1));
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_transpose(
    const unsigned short* __restrict__ x,    // [m, k], k a multiple of 8
    unsigned short* __restrict__ by_column,  // [columns, pitch]
    int m, int k, int columns, int pitch
) {
    extern __shared__ uint4 shared[];
    const int first_column = blockIdx.x * kColumns, first_token = blockIdx.y * TOKENS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 read[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int token = first_token + i * (kThreads / kUnits) + threadIdx.x / kUnits;
        const int column = first_column + threadIdx.x % kUnits * 8;
        const bool inside = token < m && column < k;
        read[i] = inside ? __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + column)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        shared[place(i * (kThreads / kUnits) + threadIdx.x / kUnits, threadIdx.x % kUnits)] = read[i];
    }
    __syncthreads();
    const int column = first_column + warp * 8 + lane / 4;
    const int row = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;  // of the 32 tokens, whose address the lane gives
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i) {
        Word eight[4];
        ldmatrix_x4_trans(eight, smem_address(shared + place(i * 32 + row, warp)));
        const int token = first_token + i * 32 + lane % 4 * 8;
        if (column < columns && token < pitch) {
            *reinterpret_cast<uint4*>(by_column + static_cast<long long>(column) * pitch + token) =
                uint4{eight[0], eight[1], eight[2], eight[3]};
        }
    }
}
