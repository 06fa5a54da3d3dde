// y[m, n] = sum_k x[m, k] * w[n, k] for any number of tokens, straight from a gqs weight: groups of 8 to 128 in 2, 3, 4 or 8
// bits, expanded once in registers for all tokens of a CTA's tile.
//
// Grid: m tiles (TILE_M tokens) by row CTAs (WARPS_N * ROW_TILES row tiles of 16 rows) by `splits` parts of K, m tiles fastest,
// so that CTAs that read the same weights run at the same time.
//
// CTA: WARPS_N by WARPS_K warps. A warp has ROW_TILES row tiles, all tokens, and 1 / WARPS_K of the CTA's k-tiles, a contiguous
// range. It loads codes from global memory to registers, PREFETCH slices ahead, dequantises them to x's dtype as A of
// mma.m16n8k16, and reads B from shared memory:
//
//    global memory                registers                                    shared memory
//    masks, starts      --------------------------------------cp.async------> headers, two windows per warp (gemm_weight.cuh)
//    codes, scale, zero --LDG---> slices of a lane's own groups <--LDS-------
//                                 --dequantise--> A [16 rows, 8 columns of each lane's group]
//    x                  --------------------------------------cp.async------> STAGES stages of x (gemm_x.cuh)
//                                 B [the same columns, 8 tokens] <--LDS------
//
// Warps that share rows add their accumulators in shared memory, in the order of K. With `splits` > 1 the sums go to `partials`
// and add_partials.cu adds them, also in the order of K. So results repeat bit for bit, and no CTA waits for another.
//
// Dynamic shared memory: STAGES * WARPS_K * TILE_M * (8 * K_TILE + 64) bytes of x, reused by the accumulators of all warps but
// the first of those that share rows (64 * ROW_TILES * TILE_M bytes each); then headers, 1024 * ROW_TILES bytes per warp.
//
// Programmatic dependent launch: nothing is read before griddepcontrol.wait (README.md).
//
// Bound, by count of instructions: dequantising for few tokens, mma.sync from some 48 on (README.md). Times are in
// results/h200/sweeps/gqs-gemm.csv.
//
// Macros: SCALAR (__half or __nv_bfloat16), BITS (2, 3, 4 or 8), GROUP_SIZE (8 to 128), TILE_M (a multiple of 8), WARPS_N,
// WARPS_K, ROW_TILES, K_TILE (32 or 64), PREFETCH, STAGES (2 to 4), CTAS_PER_SM (for registers), ALIGNED_K (K is a multiple
// of 8 and x aligned to 16 bytes). cuda/gemm_schedule.py chooses them.

#include "gemm_dequantise.cuh"
#include "gemm_weight.cuh"
#include "gemm_x.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"

constexpr int kTokenTiles = TILE_M / 8;  // tiles of 8 tokens, n of the mma
using Accumulators = float[ROW_TILES][kTokenTiles][4];

#include "add_warps.cuh"

constexpr int kPartialBytes = (WARPS_K - 1) * WARPS_N * kSumBytes;
constexpr int kStagesBytes = STAGES * kStageBytes > kPartialBytes ? STAGES * kStageBytes : kPartialBytes;

// Multiplies a unit of 8 columns (gemm_tile.cuh). Lane 4 r + g loads its columns of token r of every 8; `x` is their address
// for the first 8 tokens.
__device__ __forceinline__ void multiply_unit(Accumulators& accumulators, const Slice (&slices)[ROW_TILES],
                                              const ScaleZero (&groups)[ROW_TILES][2], int unit, Word x) {
    Word upper[ROW_TILES][4], lower[ROW_TILES][4], b[2][4];
    ld_shared_ordered(b[0], x);
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
        dequantise(upper[i], slices[i].codes[0], unit, groups[i][0]);
        dequantise(lower[i], slices[i].codes[1], unit, groups[i][1]);
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
        if (tile + 1 < kTokenTiles) ld_shared_ordered(b[(tile + 1) % 2], x + (tile + 1) * 8 * kTokenBytes);
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                const Word a[4] = {upper[i][step], lower[i][step], upper[i][step + 1], lower[i][step + 1]};
                mma_m16n8k16(accumulators[i][tile], a, b[tile % 2][step], b[tile % 2][step + 1], kElement);
            }
        }
    }
}

// Multiplies the warp's `tile`-th k-tile, and loads the slices that the warp multiplies PREFETCH slices later.
__device__ __forceinline__ void multiply_k_tile(Accumulators& accumulators, Slice (&slices)[PREFETCH][ROW_TILES],
                                                WeightStream& stream, int tile, Word x) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
        Slice(&current)[ROW_TILES] = slices[slice % PREFETCH];
        ScaleZero groups[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i)
            groups[i / 2][i % 2] = prepare(current[i / 2].scale[i % 2], current[i / 2].zero[i % 2], kElement);
#pragma unroll
        for (int unit = 0; unit < kUnitsPerSlice; ++unit)
            multiply_unit(accumulators, current, groups, unit, x + (slice * kUnitsPerSlice + unit) * kGroups * 16);
        const int ahead = slice + PREFETCH;
        stream.load(current, tile + ahead / kSlices, ahead % kSlices);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_gqs_gemm(
    // Not __restrict__: loads that the compiler takes for constants could move before griddepcontrol.wait.
    const Element* x,         // [m, k]
    const uint2* masks,       // [row_tiles, chunks]
    const Word* starts,       // [row_tiles * chunks + 1]
    const char* codes,        // [kept, kGroupBytes]
    const char* scale,        // [kept], an Element each
    const char* zero,         // [kept]
    const Element* bias,      // [n] or null
    Element* __restrict__ y,  // [m, n]
    float* __restrict__ partials,           // [splits, m, 16 row_tiles]; unused with one split
    int m, int n, int k,
    int row_tiles, int chunks,              // chunks per row tile
    int m_tiles, int row_ctas, int splits,  // the grid
    int k_tiles                             // along K
) {
    extern __shared__ uint4 shared[];
    const int warp = warp_id(), warp_n = warp % WARPS_N, warp_k = warp / WARPS_N, lane = threadIdx.x % 32;
    const int m_tile = blockIdx.x % m_tiles, row_cta = blockIdx.x / m_tiles % row_ctas, split = blockIdx.x / m_tiles / row_ctas;
    const int begin = static_cast<long long>(k_tiles) * split / splits;
    const int end = static_cast<long long>(k_tiles) * (split + 1) / splits;
    const int per_warp = (end - begin + WARPS_K - 1) / WARPS_K, first = begin + warp_k * per_warp;
    const int row_tile = (row_cta * WARPS_N + warp_n) * ROW_TILES;
    const Weight weight = {masks, starts, codes, scale, zero, row_tiles, chunks};
    const Word smem = smem_address(shared);
    WeightStream stream(weight, smem + kStagesBytes + warp * kWarpHeaderBytes, row_tile, first, min(first + per_warp, end));
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    stream.copy_headers(0);
    stream.copy_headers(1);
    cp_async_commit_group();
    const ActivationStages stages(x, smem, m, k, m_tile * TILE_M, begin, end, per_warp);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) stages.issue(i);
    cp_async_wait_group<STAGES - 1>();
    __syncwarp();
    Slice slices[PREFETCH][ROW_TILES] = {};
#pragma unroll
    for (int i = 0; i < PREFETCH; ++i) stream.load(slices[i], 0, i);
    Accumulators accumulators;
#pragma unroll
    for (int i = 0; i < ROW_TILES * TILE_M / 2; ++i) accumulators[i / 4 / kTokenTiles][i / 4 % kTokenTiles][i % 4] = 0.0f;
    const Word b = smem + warp_k * kKTileBytes + lane / kGroups * kTokenBytes + lane % kGroups * 16;
#pragma unroll 1
    for (int i = 0; i < per_warp; ++i) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        stages.issue(i + STAGES - 1);
        multiply_k_tile(accumulators, slices, stream, i, b + i % STAGES * kStageBytes);
    }
    if constexpr (WARPS_K > 1) {
        cp_async_wait_group<0>();
        add_warps(accumulators, smem, warp_n, warp_k, threadIdx.x % 32);
        if (warp_k > 0) return;
    }
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (row_tile + j) * kRows + half * 8 + lane / 4;
            // add_partials.cu reads four rows at once: those of the last row tile past n, too.
            if (row >= (splits == 1 ? n : kRows * row_tiles)) continue;
            const float added = splits == 1 && bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * kTokenTiles; ++i) {
                const int token = m_tile * TILE_M + i / 2 * 8 + lane % 4 * 2 + i % 2;
                const float sum = accumulators[j][i / 2][2 * half + i % 2];
                if (token >= m) continue;
                if (splits == 1) store(y + static_cast<long long>(token) * n + row, sum + added);
                else partials[(static_cast<long long>(split) * m + token) * (kRows * row_tiles) + row] = sum;
            }
        }
    }
}
