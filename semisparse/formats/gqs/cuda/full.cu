// y[m, n] = sum_k x[m, k] * w[n, k] for 1 to some 64 tokens and a gqs weight of which no group is dropped: groups of 16 to 128 in 2,
// 3, 4 or 8 bits. Masks and starts are not read: the place of a group follows from its row and column.
//
// Grid: row CTAs (WARPS_N * ROW_TILES row tiles of 16 rows) by m tiles (TILE_M tokens).
//
// CTA: WARPS_N by WARPS_K warps. A warp has ROW_TILES row tiles and every WARPS_K-th k-tile (128 columns; full_tile.cuh). In an
// iteration each warp multiplies one k-tile (full_multiply.cuh):
//
//    global memory                shared memory, STAGES stages                      registers
//    codes, scale, zero --cp.async--> each warp's own k-tile (full_weight.cuh) --LDS--> A: 16 rows, 4 columns of each of 4 lanes
//    x                  --cp.async--> WARPS_K k-tiles of TILE_M tokens (full_x.cuh) --LDS--> B: the same columns, 8 tokens
//    y                  <---------------------------------------------------------- accumulators
//
// Warps that share rows add their accumulators in shared memory, in a fixed order: results repeat bit for bit. No CTA waits for
// another.
//
// Dynamic shared memory: STAGES times (WARPS_K * TILE_M * 256 bytes of x, then kRowTileBytes per warp and row tile), reused by the
// accumulators of all warps but the first of those that share rows.
//
// Programmatic dependent launch: before griddepcontrol.wait a warp prefetches its first codes to L2, which is harmless even if the
// preceding kernel still writes the weight.
//
// Macros: SCALAR (__half or __nv_bfloat16), BITS, GROUP_SIZE and MULTIPLY_CODES (full_tile.cuh), TILE_M (a multiple of 8), WARPS_N,
// WARPS_K, ROW_TILES, STAGES (2 or more), CTAS_PER_SM (for registers). cuda/full_schedule.py chooses them.

constexpr int kWarps = WARPS_N * WARPS_K;
constexpr int kThreads = 32 * kWarps;

#include "full_multiply.cuh"
#include "full_weight.cuh"
#include "full_x.cuh"
#include "ptx/griddepcontrol.cuh"
#include "warp.cuh"

constexpr int kWarpBytes = ROW_TILES * kRowTileBytes;             // per stage
constexpr int kStageBytes = kXStageBytes + kWarps * kWarpBytes;
constexpr int kSumBytes = ROW_TILES * kTokenTiles * 4 * 4 * 32;   // of a warp's accumulators

// Offset of a stage, in bytes.
struct Stage {
    Word at = 0;
    __device__ __forceinline__ void advance() { at = at + kStageBytes == STAGES * kStageBytes ? 0 : at + kStageBytes; }
};

// Prefetches the first codes of the warp's row tiles to L2.
__device__ __forceinline__ void prefetch(const WeightCopy& weight, Word bytes) {
    if (!bytes || !elect_sync()) return;
    for (Word i = 0; i <= weight.last; ++i)
        cp_async_bulk_prefetch_L2(mad_wide(i * weight.row_tile_groups, kGroupBytes, weight.codes), bytes);
}

// Adds the accumulators of the warps that share rows into those of the first.
__device__ __forceinline__ void add_warps(Accumulators& accumulators, Word smem, int warp_n, int warp_k, int lane) {
    const Word own = smem + warp_n * kSumBytes + 16 * lane;
    cp_async_wait_group<0>();
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

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_gqs_full(
    // Not __restrict__: loads that the compiler takes for constants could move before griddepcontrol.wait.
    const Element* x,         // [m, k], aligned to 16 bytes, k a multiple of 8
    const char* codes,        // [n * groups, kGroupBytes]
    const char* scale,        // [n * groups], an Element each
    const char* zero,         // [n * groups]
    const Element* bias,      // [n] or null
    Element* __restrict__ y,  // [m, n]
    int m, int n, int k,
    int groups,               // per row
    int row_tiles, int k_tiles, int row_ctas,
    int prefetch_bytes        // of codes per row tile
) {
    extern __shared__ uint4 shared[];
    const int warp = warp_id(), warp_n = warp % WARPS_N, warp_k = warp / WARPS_N, lane = threadIdx.x % 32;
    const int row_cta = blockIdx.x % row_ctas, m_tile = blockIdx.x / row_ctas;
    const int first_row_tile = (row_cta * WARPS_N + warp_n) * ROW_TILES;
    const Word smem = smem_address(shared), own = smem + kXStageBytes + warp * kWarpBytes;
    const WeightCopy weight({codes, scale, zero, groups}, first_row_tile, row_tiles, own, lane);
    const WeightRead read(own, lane);
    const XStages x_stages(x, smem, m_tile * TILE_M, m, k, warp_k, lane);
    if (warp_k == 0) prefetch(weight, prefetch_bytes);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Word anchor = kAnchor ? keep_constant(kAnchor, k) : 0;
    Stage filled, used;
    auto copy = [&](int iteration) {  // as one cp.async group
        const int k_tile = iteration * WARPS_K + warp_k;
        if (k_tile < k_tiles) weight.copy(filled.at, ChunkPart(k_tile, groups));
        if (iteration * WARPS_K < k_tiles) x_stages.copy(filled.at, iteration);
        cp_async_commit_group();
        filled.advance();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy(i);
    Accumulators accumulators = {};
    const int iterations = (k_tiles + WARPS_K - 1) / WARPS_K;
#pragma unroll 1
    for (int i = 0; i < iterations; ++i, used.advance()) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        copy(i + STAGES - 1);
        const int k_tile = i * WARPS_K + warp_k;
        if (k_tile < k_tiles)
            multiply_k_tile(accumulators, read, x_stages, used.at, skew_of(ChunkPart(k_tile, groups), read.row),
                            anchor);
    }
    if constexpr (WARPS_K > 1) {
        add_warps(accumulators, smem, warp_n, warp_k, lane);
        if (warp_k > 0) return;
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
        if (first_row_tile + i >= row_tiles) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (first_row_tile + i) * kRows + half * 8 + lane / 4;
            const float added = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * kTokenTiles; ++j) {
                const int token = m_tile * TILE_M + j / 2 * 8 + lane % 4 * 2 + j % 2;
                if (token < m) store(y + static_cast<size_t>(token) * n + row, accumulators[i][j / 2][2 * half + j % 2] + added);
            }
        }
    }
}
