// An iteration of gemm.cuh by mma.sync, for few tokens: each k-step is expanded and multiplied at once, so a warp holds one
// fragment, and warps of a warpgroup need not meet. So few registers are needed that an SM holds more consumer warps, which hide
// the latency of expanding.

#pragma once

#include "expand_gemm/epilogue.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

constexpr int kTokenPairs = (TILE_M + 15) / 16;  // ldmatrix instructions per k-step, of 16 tokens each
static_assert(TILE_M == 8 || TILE_M % 16 == 0, "ldmatrix loads 16 tokens of a k-step, or 8 of two");

// The byte offset in a slice of x from which lane l loads row l % 8 of matrix l / 8 in k-step 0. For eight tokens the matrices are
// the 16-byte units 0 to 3: two k-steps; else units 0 and 1 of tokens 0 to 7, then of tokens 8 to 15. Units are swizzled; so k-step
// `step` is at the offset XOR 32 * step.
__device__ __forceinline__ Word x_offset(int lane) {
    const int matrix = lane / 8, row = lane % 8;
    if constexpr (TILE_M == 8) return row * 128 + (matrix ^ row) * 16;
    return (row + matrix / 2 * 8) * 128 + (matrix % 2 ^ row) * 16;
}

// Multiplies k-step `step` of a slice; `x` is the lane's address in it. `b` keeps the second k-step's part where ldmatrix loads two.
template <int step>
__device__ __forceinline__ void mma_step(Accumulators& accumulators, const Word (&weights)[4], Word x, Word (&b)[4]) {
#pragma unroll
    for (int pair = 0; pair < kTokenPairs; ++pair) {
        if (TILE_M > 8 || step % 2 == 0) ldmatrix_x4(b, (x ^ 32 * step) + pair * 16 * 128);
#pragma unroll
        for (int group = 2 * pair; group < kTokenGroups && group < 2 * pair + 2; ++group) {
            float(&d)[4] = reinterpret_cast<float(&)[4]>(accumulators[4 * group]);
            const int at = TILE_M == 8 ? step % 2 * 2 : group % 2 * 2;
            mma_m16n8k16(d, weights, b[at], b[at + 1], static_cast<const SCALAR*>(nullptr));
        }
    }
}

// Expands and multiplies the k-steps of a slice.
template <int slice, int step = 0, typename Tile>
__device__ __forceinline__ void mma_slice(Accumulators& accumulators, Tile& tile, Word x, Word (&b)[4]) {
    Word weights[4];
    tile.template expand<kSliceSteps * slice + step>(weights);
    mma_step<step>(accumulators, weights, x, b);
    if constexpr (step + 1 < kSliceSteps) mma_slice<slice, step + 1>(accumulators, tile, x, b);
}
