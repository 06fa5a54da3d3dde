// y[m, n] = sum_k x[m, k] * w[n, k] for a bitmask weight and m of 1 to TOKENS.
//
// A warp computes one row of w. It takes a 64-column block at a time; lane l looks after the columns l and l + 32 of it.
// A lane's value stands as many slots after the block's first as bits are set below its own, so that a warp's loads of
// values, and those of x, are consecutive. Sums are float32 and reduced by shuffles: every run gives the same bits.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, w, bias and y) and TOKENS (1, 2, 4, 8 or 16).

#include "types.cuh"
#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kBlock = 64;
constexpr Word kAllLanes = 0xffffffffu;
constexpr int kUnroll = 4;  // blocks in flight: their loads are independent

__device__ __forceinline__ void accumulate(
    float (&sums)[TOKENS], const SCALAR* x, const int (&token_starts)[TOKENS], int column, float weight
) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) sums[token] += weight * to_float(x[token_starts[token] + column]);
}

// Blocks a processor: one token needs every warp it can get (32 registers; 41 us at 4096 x 4096 with 47, 25 with 32); with
// more, left to itself, the compiler spills on sm_100a at 16 tokens.
extern "C" __global__ void __launch_bounds__(256, TOKENS == 1 ? 8 : 2) semisparse_bitmask_decode(
    const SCALAR* __restrict__ x,               // [m, k]
    const uint2* __restrict__ masks,            // [n, blocks], low word first
    const SCALAR* __restrict__ values,          // [n, blocks * count], or [kept]
    const long long* __restrict__ row_starts,   // [n + 1] in the variable layout, else null
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    int m, int n, int k, int blocks, int count  // count: values a block in the exact layout
) {
    const int lane = threadIdx.x % kWarp;
    const int row = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (row >= n) return;
    const Word below = (1u << lane) - 1;
    const uint2* mask = masks + (long long)row * blocks;
    const SCALAR* value = values + (row_starts ? row_starts[row] : (long long)row * blocks * count);
    // Tokens past m repeat the last one and are not stored: a test in the loop would keep their loads from overlapping.
    int token_starts[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) token_starts[token] = min(token, m - 1) * k;
    float sums[TOKENS] = {};

#pragma unroll kUnroll
    for (int block = 0; block < blocks; ++block) {
        const uint2 bits = mask[block];
        const int low_count = __popc(bits.x);
        const int column = block * kBlock + lane;
        // A bit past column k belongs to a zero of the exact layout's last block; x has no such column.
        if ((bits.x >> lane & 1) && column < k) {
            accumulate(sums, x, token_starts, column, to_float(value[__popc(bits.x & below)]));
        }
        if ((bits.y >> lane & 1) && column + kWarp < k) {
            accumulate(sums, x, token_starts, column + kWarp, to_float(value[low_count + __popc(bits.y & below)]));
        }
        value += row_starts ? low_count + __popc(bits.y) : count;
    }

#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
        for (int step = kWarp / 2; step > 0; step /= 2) sums[token] += __shfl_xor_sync(kAllLanes, sums[token], step);
        if (lane == 0 && token < m) {
            store(y + (long long)token * n + row, sums[token] + (bias ? to_float(bias[row]) : 0.0f));
        }
    }
}
