// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `rows` and m of 1 to TOKENS, after
// RheoSparse's kernel (section IV, algorithm 1); decode_rows.py says what differs.
//
// Grid: n / 8 rounded up. CTA: 8 warps, a row of w each. No shared memory. A warp takes one block of 64 columns at a time; lane
// l multiplies columns l and l + 32. The index of a lane's value in the block is the number of mask bits set below its own
// (popcount), so a warp's loads of values and of x are consecutive. Accumulators are float32, reduced by shuffles: every run
// returns the same bits.
//
// 24.9 us at 4096 x 4096, 32:64 and one token, where cuBLAS takes 13.2 (H200); not profiled.
//
// Compiled with SCALAR (__half or __nv_bfloat16, of x, w, bias and y) and TOKENS (1, 2, 4, 8 or 16).

#include "types.cuh"
#include "ptx/word.cuh"

constexpr int kWarpSize = 32;
constexpr int kBlockColumns = 64;
constexpr Word kAllLanes = 0xffffffffu;
constexpr int kUnroll = 4;  // blocks in flight: their loads are independent

__device__ __forceinline__ void accumulate(
    float (&accumulators)[TOKENS], const SCALAR* x, const int (&token_starts)[TOKENS], int column, float weight
) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) accumulators[token] += weight * to_float(x[token_starts[token] + column]);
}

// CTAs per SM: 8 for one token, which limits registers to 32 and makes the SM full (25 us at 4096 x 4096; 41 us with 47
// registers). For more tokens 2: with 4, or no bound, the compiler spills on sm_100a at 16 tokens.
extern "C" __global__ void __launch_bounds__(256, TOKENS == 1 ? 8 : 2) semisparse_bitmask_decode_rows(
    const SCALAR* __restrict__ x,               // [m, k]
    const uint2* __restrict__ masks,            // [n, blocks], low word first
    const SCALAR* __restrict__ values,          // [n, blocks * count], or [kept]
    const long long* __restrict__ row_starts,   // [n + 1] in the variable layout, else null
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    int m, int n, int k, int blocks, int count  // count: values per block in the exact layout
) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = blockIdx.x * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    if (row >= n) return;
    const Word below = (1u << lane) - 1;
    const uint2* mask = masks + (long long)row * blocks;
    const SCALAR* value = values + (row_starts ? row_starts[row] : (long long)row * blocks * count);
    // Tokens from m on repeat the last one and are not stored: a test in the loop would keep their loads from overlapping.
    int token_starts[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) token_starts[token] = min(token, m - 1) * k;
    float accumulators[TOKENS] = {};

#pragma unroll kUnroll
    for (int block = 0; block < blocks; ++block) {
        const uint2 bits = mask[block];
        const int low_count = __popc(bits.x);
        const int column = block * kBlockColumns + lane;
        // A bit past column k belongs to a zero of the exact layout's last block; x has no such column.
        if ((bits.x >> lane & 1) && column < k) {
            accumulate(accumulators, x, token_starts, column, to_float(value[__popc(bits.x & below)]));
        }
        if ((bits.y >> lane & 1) && column + kWarpSize < k) {
            accumulate(accumulators, x, token_starts, column + kWarpSize, to_float(value[low_count + __popc(bits.y & below)]));
        }
        value += row_starts ? low_count + __popc(bits.y) : count;
    }

#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
        for (int step = kWarpSize / 2; step > 0; step /= 2)
            accumulators[token] += __shfl_xor_sync(kAllLanes, accumulators[token], step);
        if (lane == 0 && token < m) {
            store(y + (long long)token * n + row, accumulators[token] + (bias ? to_float(bias[row]) : 0.0f));
        }
    }
}
