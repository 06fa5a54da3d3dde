// x_t[k, m] = x[m, k] for 16-bit types, zeros past K and M, so that the kernels that gather columns of x need no bounds
// checks.
//
// Grid: (tiles of 64 columns, tiles of TILE_M tokens). CTA: 256 threads. Shared memory: the tile, [TILE_M, 64], TILE_M *
// 128 bytes.
// Warps: each loads 16-byte chunks of rows, stores them to shared memory, then reads eight columns by ldmatrix.trans. The
// rows of a matrix may be any tokens: those of matrix i are tokens 2 i and 2 i + 1 of each eight, so that a lane gets eight
// consecutive tokens of one column and stores them as 16 bytes.
// Bound: memory. M = 2,048, K = 4,096 takes 9.9, 9.9, 9.8 and 10.4 us with TILE_M of 32, 64, 128 and 256 (H200).
//
// Macros: TILE_M, a multiple of 32; ALIGNED, whether rows of x begin at multiples of 16 bytes.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kThreads = 256;
constexpr int kTileColumns = 64;
constexpr int kChunks = kTileColumns / 8;  // 16-byte chunks per token
constexpr int kPasses = TILE_M * kChunks / kThreads;

// Swizzle: the eight rows of a matrix, and the chunks of a row, lie in eight different groups of banks.
__device__ __forceinline__ int swizzled(int token, int chunk) {
    return token * kChunks + (chunk ^ ((token & 1) | (token >> 3 & 3) << 1));
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_transpose(
    const unsigned short* __restrict__ x,  // [m, k]
    unsigned short* __restrict__ x_t,      // [columns, pitch]
    int m, int k, int columns, int pitch
) {
    extern __shared__ uint4 shared[];
    const int first_column = blockIdx.x * kTileColumns, first_token = blockIdx.y * TILE_M;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 loaded[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int token = first_token + i * (kThreads / kChunks) + threadIdx.x / kChunks;
        const int column = first_column + threadIdx.x % kChunks * 8;
        const bool inside = token < m && column < k;
#if ALIGNED
        loaded[i] = inside ? __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + column)) : uint4{};
#else
        loaded[i] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (inside && column + j < k) {
                reinterpret_cast<unsigned short*>(&loaded[i])[j] = x[static_cast<long long>(token) * k + column + j];
            }
        }
#endif
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        shared[swizzled(i * (kThreads / kChunks) + threadIdx.x / kChunks, threadIdx.x % kChunks)] = loaded[i];
    }
    __syncthreads();
    const int column = first_column + warp * 8 + lane / 4;
    const int row = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;  // of every 32 tokens, the one whose address the lane gives
#pragma unroll
    for (int i = 0; i < TILE_M / 32; ++i) {
        Word eight[4];
        ldmatrix_x4_trans(eight, smem_address(shared + swizzled(i * 32 + row, warp)));
        const int token = first_token + i * 32 + lane % 4 * 8;
        if (column < columns && token < pitch) {
            *reinterpret_cast<uint4*>(x_t + static_cast<long long>(column) * pitch + token) =
                uint4{eight[0], eight[1], eight[2], eight[3]};
        }
    }
}
