// y[m, n] = sum_k x[m, k] * w[n, k] for 1 to 64 tokens and a gqs weight of which no group is dropped: groups of 16 to 128 in 2, 3,
// 4 or 8 bits. Masks and starts are not read: the address of a group follows from its row and column.
//
// Grid: row CTAs (WARPS_N * ROW_TILES row tiles of 16 rows) by m tiles (TILE_M tokens).
//
// CTA: WARPS_N by WARPS_K warps. A warp has ROW_TILES row tiles and every WARPS_K-th k-tile (128 columns; full_tile.cuh). In an
// iteration each warp multiplies one k-tile (full_multiply.cuh):
//
//    global memory                    shared memory                                          registers
//    codes, scale, zero --cp.async--> STAGES of each warp's own k-tile (full_weight.cuh) --LDS--> A: 16 rows, 4 columns per lane
//    x                  --cp.async--> slots of WARPS_K k-tiles of TILE_M tokens (full_x.cuh) --LDS--> B: the same columns, 8 tokens
//    y                  <------------------------------------------------------------------ accumulators
//
// A warp copies its own weights, so it waits for other warps only because of x, once per X_SPAN iterations. Warps that share rows
// add their accumulators in shared memory, in a fixed order: results repeat bit for bit. No CTA waits for another.
//
// Dynamic shared memory: 2 X_SPAN + STAGES - 2 slots of WARPS_K * TILE_M * 256 bytes of x, then STAGES times kRowTileBytes per warp
// and row tile, reused by the accumulators of all warps but the first of those that share rows.
//
// With X_TOKENS there are no slots: after the stages, shared memory has all of x, 256 bytes per token and k-tile, and 256 bytes of
// zeros, so the main loop has no CTA-wide barrier.
//
// Programmatic dependent launch: before griddepcontrol.wait a warp prefetches its first codes to L2, which is harmless even if the
// preceding kernel still writes the weight. A fused kernel (fusion.cuh) fills its stages before the wait, and loads x after it.
//
// Macros: SCALAR (__half or __nv_bfloat16), BITS, GROUP_SIZE and MULTIPLY_CODES (full_tile.cuh), TILE_M (a multiple of 8), X_TOKENS
// (maximum m if all of x is in shared memory, else 0), WARPS_N, WARPS_K, ROW_TILES (even with SILU_MUL), STAGES (2 or more),
// X_SPAN, CTAS_PER_SM (for registers), and those of fusion.cuh, which need X_TOKENS. cuda/full_schedule.py chooses them.

constexpr int kWarps = WARPS_N * WARPS_K;
constexpr int kThreads = 32 * kWarps;

#include "arrive_warp.cuh"
#include "full_multiply.cuh"
#include "full_weight.cuh"
#include "full_x.cuh"
#include "add_warps.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kWarpBytes = ROW_TILES * kRowTileBytes;  // per stage
constexpr int kStageBytes = kWarps * kWarpBytes;
// x of an iteration is copied kXAhead iterations before: so early that one barrier per X_SPAN iterations is enough.
constexpr int kXAhead = X_SPAN + STAGES - 2, kXSlots = X_TOKENS ? 0 : 2 * X_SPAN + STAGES - 2;

// A counter modulo `end`.
template <typename T>
struct Cyclic {
    T at, end;
    __device__ __forceinline__ void advance(T step) { at = at + step == end ? 0 : at + step; }
};

// The row tiles of a warp: `first` and the next ones, of the weight's `count`. With SILU_MUL half of them are in the gate, the first
// half of the rows, and half in the up projection; `first` and `count` are then those of the gate.
struct RowTiles {
    static constexpr int kOwn = SILU_MUL ? ROW_TILES / 2 : ROW_TILES;
    Word first, count;
    Word tiles[ROW_TILES];  // past the last row tile, the last one again, whose results are then not stored

    __device__ __forceinline__ RowTiles(Word first, Word all) : first(first), count(SILU_MUL ? all / 2 : all) {
#pragma unroll
        for (Word i = 0; i < ROW_TILES; ++i) tiles[i] = min(first + i % kOwn, count - 1) + i / kOwn * count;
    }
};

// Prefetches the first codes of the warp's row tiles to L2.
__device__ __forceinline__ void prefetch(const WeightCopy& weight, Word bytes) {
    if (!bytes || !elect_sync()) return;
#pragma unroll
    for (Word i = 0; i < ROW_TILES; ++i)
        cp_async_bulk_prefetch_L2(mad_wide(weight.before[i], kGroupBytes, weight.codes), bytes);
}

// What a warp stores: y, with what is added to it.
struct Output {
    const Element *bias, *residual;
    Element* y;
    int m, width;  // columns of y

    __device__ __forceinline__ void store_row(const Accumulators& accumulators, const RowTiles& rows, int i, int half, int m_tile,
                                              int lane) const {
        const int row = (rows.first + i) * kRows + half * 8 + lane / 4;
        const float added = bias ? to_float(bias[row]) : 0.0f;
        const float added_up = SILU_MUL && bias ? to_float(bias[rows.count * kRows + row]) : 0.0f;
#pragma unroll
        for (int j = 0; j < 2 * kTokenTiles; ++j) {
            const int token = m_tile * TILE_M + j / 2 * 8 + lane % 4 * 2 + j % 2, at_sum = 2 * half + j % 2;
            if (token >= m) continue;
            const size_t at = static_cast<size_t>(token) * width + row;
            float value = accumulators[i][j / 2][at_sum] + added;
            if (SILU_MUL) value = silu_mul(value, accumulators[i + ROW_TILES - RowTiles::kOwn][j / 2][at_sum] + added_up);
            if (ADD_RESIDUAL) value = rounded(value) + to_float(residual[at]);
            store(y + at, value);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_gqs_full(
    // Not __restrict__: loads that the compiler takes for constants could move before griddepcontrol.wait.
    const Element* x,            // [m, k], aligned to 16 bytes, k a multiple of 8
    const char* codes,           // [n * groups, kGroupBytes]
    const char* scale,           // [n * groups], an Element each
    const char* zero,            // [n * groups]
    const Element* bias,         // [n] or null
    const Element* norm_weight,  // [k], aligned to 16 bytes, with RMS_NORM
    const Element* residual,     // [m, n] with ADD_RESIDUAL
    Element* y,                  // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k,
    int groups,                  // per row
    int row_tiles, int k_tiles, int row_ctas,
    int prefetch_bytes,          // of codes per row tile
    float epsilon                // of RMS_NORM
) {
    extern __shared__ uint4 shared[];
    const int warp = warp_id(), warp_n = warp % WARPS_N, warp_k = warp / WARPS_N, lane = threadIdx.x % 32;
    const int row_cta = blockIdx.x % row_ctas, m_tile = blockIdx.x / row_ctas;
    const RowTiles rows((row_cta * WARPS_N + warp_n) * RowTiles::kOwn, row_tiles);
    const Word smem = smem_address(shared), own = smem + kXSlots * kXSlotBytes + warp * kWarpBytes;
    const WeightCopy weight({codes, scale, zero, static_cast<Word>(groups)}, rows.tiles, own, lane);
    const WeightRead read(own, lane);
    const Word anchor = kAnchor ? keep_constant(kAnchor, k) : 0;
    const int iterations = (k_tiles + WARPS_K - 1) / WARPS_K;
    // CTAs begin at different columns: otherwise all would read the same lines of x at the same time.
    const int begin = row_cta % iterations;
    Cyclic<Word> filled{0, STAGES * kStageBytes}, used = filled;  // offsets of the stages to copy to, and to read
    Cyclic<int> turn{begin, iterations}, copied = turn;           // the iterations to multiply, and to copy
    auto copy_weight = [&](int number) {
        const int k_tile = copied.at * WARPS_K + warp_k;
        if (number < iterations && k_tile < k_tiles) weight.copy(filled.at, ChunkPart(k_tile, groups));
        copied.advance(1);
        filled.advance(kStageBytes);
    };
#if X_TOKENS
    const WholeX all_x(smem + STAGES * kStageBytes, lane);
    const XStage<kWarps, X_TOKENS> x_stage(norm_weight, m, k);
    if (kFused) {
        griddepcontrol_launch_dependents();
    } else {
        if (warp_k == 0) prefetch(weight, prefetch_bytes);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy_weight(i), cp_async_commit_group();
    if (kFused) griddepcontrol_wait();
    all_x.copy(x_stage, x, m, k_tiles, epsilon);
    Cyclic<Word> x_used{0, 0};
#else
    const StagedX all_x(x, smem, m_tile * TILE_M, m, k, warp_k, lane);
    Cyclic<Word> x_filled{0, kXSlots * kXSlotBytes}, x_used = x_filled;
    Cyclic<int> x_copied = turn;
    auto copy_x = [&](int number) {
        if (number < iterations) all_x.copy(x_filled.at, x_copied.at);
        x_copied.advance(1);
        x_filled.advance(kXSlotBytes);
    };
    if (warp_k == 0) prefetch(weight, prefetch_bytes);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        copy_weight(i);
        if (i == 0)
            for (int j = 0; j < X_SPAN; ++j) copy_x(j);
        else copy_x(X_SPAN + i - 1);
        cp_async_commit_group();
    }
#endif
    Accumulators accumulators = {};
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
        cp_async_wait_group<STAGES - 2>();
        if (X_TOKENS || i % X_SPAN) sync_warp_copied();
        else __syncthreads();
        copy_weight(i + STAGES - 1);
#if !X_TOKENS
        copy_x(i + kXAhead);
#endif
        cp_async_commit_group();
        const int k_tile = turn.at * WARPS_K + warp_k;
        if (k_tile < k_tiles)
            multiply_k_tile(accumulators, read, all_x, used.at, all_x.offset_of(x_used.at, k_tile),
                            skew_of(ChunkPart(k_tile, groups), read.row), anchor);
        turn.advance(1);
        used.advance(kStageBytes);
        if (!X_TOKENS) x_used.advance(kXSlotBytes);
    }
    if constexpr (WARPS_K > 1) {
        cp_async_wait_group<0>();
        add_warps(accumulators, smem, warp_n, warp_k, lane);
        if (warp_k > 0) return;
    }
    const Output output{bias, residual, y, m, SILU_MUL ? n / 2 : n};
#pragma unroll
    for (int i = 0; i < RowTiles::kOwn; ++i) {
        if (rows.first + i >= rows.count) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) output.store_row(accumulators, rows, i, half, m_tile, lane);
    }
}
