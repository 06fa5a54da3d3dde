// Adds the accumulators of the warps that share rows, in shared memory, into those of the first.
//
// Compiled with ROW_TILES, WARPS_N, WARPS_K; included where Accumulators and kTokenTiles are defined.

#pragma once

#include "ptx/shared.cuh"

constexpr int kSumBytes = ROW_TILES * kTokenTiles * 4 * 4 * 32;  // of a warp's accumulators

// `smem`, room for (WARPS_K - 1) * WARPS_N * kSumBytes, is no longer read or written as anything else.
__device__ __forceinline__ void add_warps(Accumulators& accumulators, Word smem, int warp_n, int warp_k, int lane) {
    const Word own = smem + warp_n * kSumBytes + 16 * lane;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ROW_TILES * kTokenTiles; ++j) {
        const float(&sums)[4] = accumulators[j / kTokenTiles][j % kTokenTiles];
        const Word words[4] = {__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]),
                               __float_as_uint(sums[3])};
        if (warp_k > 0) st_shared_v4(own + (warp_k - 1) * WARPS_N * kSumBytes + 512 * j, words);
    }
    __syncthreads();
    if (warp_k > 0) return;
#pragma unroll
    for (int j = 0; j < ROW_TILES * kTokenTiles; ++j) {
#pragma unroll
        for (int other = 0; other + 1 < WARPS_K; ++other) {
            Word words[4];
            ld_shared_ordered(words, own + other * WARPS_N * kSumBytes + 512 * j);
#pragma unroll
            for (int i = 0; i < 4; ++i) accumulators[j / kTokenTiles][j % kTokenTiles][i] += __uint_as_float(words[i]);
        }
    }
}
