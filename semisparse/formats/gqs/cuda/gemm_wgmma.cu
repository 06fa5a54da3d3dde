// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a gqs weight with groups of 8 to 128 and any m, with Hopper's wgmma:
// expand_gemm/gemm.cuh (grid, CTA, shared memory). Producer warps copy the tiles of each consumer warp (wgmma_stream.cuh),
// which expands them in registers (wgmma_tile.cuh). Weights are those of `unpack`, bit for bit. Bound: README.md.
//
// Compiled with BITS (2, 3, 4 or 8), GROUP_SIZE (8 to 128), EXPERTS, the macros of gemm.cuh, and FULL (0 if not defined): no group
// is dropped and n is a multiple of 16, so masks and starts are not read (wgmma_full.cuh).

#ifndef FULL
#define FULL 0
#endif

#if FULL
#include "wgmma_full.cuh"
#else
#include "wgmma_stream.cuh"
#endif

#if EXPERTS
extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1) EXPAND_GEMM_BOUNDS semisparse_gqs_experts_gemm(
    const unsigned char* __restrict__ x,  // as permute_x.cu stores it, with BLOCK = GROUP_SIZE
    const uint2* __restrict__ masks,      // [experts * row_tiles, chunks], low word first
    const Word* __restrict__ starts,      // [experts * row_tiles * chunks + 1]
    const char* __restrict__ codes,       // [kept, kGroupBytes]
    const char* __restrict__ scale,       // [kept], an Element each
    const char* __restrict__ zero,        // [kept]
    const SCALAR* __restrict__ bias,      // [experts * n] or null
    SCALAR* __restrict__ y,               // [pairs, n]
    float4* partials,                     // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                        // [CTAs, kConsumerWarps], zeros
    const int* job_count, const int* job_experts, const int* job_pairs,  // the struct Jobs of expand_gemm/stream_k.cuh
    int n, int row_tiles, int column_tiles,  // of an expert
    int all_chunks, int chunks               // of the stack, and per row tile
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Groups weight{masks, starts, codes, scale, zero, all_chunks, chunks};
    expand_gemm(weight, {x, bias, y, {partials, counters}, 0, n, row_tiles, column_tiles, {job_count, job_experts, job_pairs}},
                shared);
}
#else
extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1) EXPAND_GEMM_BOUNDS semisparse_gqs_gemm_wgmma(
    const unsigned char* __restrict__ x,  // as permute_x.cu stores it, with BLOCK = GROUP_SIZE
    const uint2* __restrict__ masks,      // [row_tiles, chunks], low word first
    const Word* __restrict__ starts,      // [row_tiles * chunks + 1]
    const char* __restrict__ codes,       // [kept, kGroupBytes]
    const char* __restrict__ scale,       // [kept], an Element each
    const char* __restrict__ zero,        // [kept]
    const SCALAR* __restrict__ bias,      // [n] or null
    SCALAR* __restrict__ y,               // [m, n]
    float4* partials,                     // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                        // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles,
    int chunks, int groups                // per row tile; per row
) {
    extern __shared__ __align__(1024) unsigned char shared[];
#if FULL
    const FullGroups weight{codes, scale, zero, groups};
#else
    const Groups weight{masks, starts, codes, scale, zero, row_tiles * chunks, chunks};
#endif
    expand_gemm(weight, {x, bias, y, {partials, counters}, m, n, row_tiles, column_tiles}, shared);
}
#endif
