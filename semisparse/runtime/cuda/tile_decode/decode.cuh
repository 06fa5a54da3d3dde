// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a weight in tiles of 16 rows by 256 columns and m of 1 to TILE_M, by mma.m16n8k16.
//
// Grid: 1-D, persistent CTAs. CTA: WARPS_N x WARPS_K warps. The WARPS_K warps of a row tile (16 rows of w) split its column
// tiles among them (sliced-K). The CTA computes WARPS_N row tiles at a time and strides over all row tiles of w.
//
// A warp expands a tile into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand. Tokens are the 8 columns of
// the other operand, so 8 tokens take the same number of mma as 1. A row of a tile has 4 blocks of 64 columns; lane 4 g + t expands
// block t of rows g and g + 8. A k-step takes 4 columns of each block, so the 16 columns of a fragment are a permutation of K, which x's
// fragments follow.
//
// Dynamic shared memory, in bytes:
//   WARPS_N * WARPS_K rings of STAGES weight tiles          Tiles::kTileBytes each
//   WARPS_K rings of STAGES x tiles, m tokens by 256 columns 512 m each; the WARPS_N warps of the same K slice share one;
//     in a fused kernel (fusion.cuh) all x tiles instead, copied once (stage_x.cuh; with EXPERTS copy_all_x)
//   accumulators of every warp, double-buffered              64 TILE_M each
// Both rings are filled with cp.async, STAGES tiles ahead; x by loads and st.shared if its rows are not aligned to 16 bytes. A
// stage's x tile is kept if the next weight tile of that stage has the same columns, of another row tile.
//
// A fused kernel without EXPERTS issues the copies of its first weight tiles before griddepcontrol.wait. With SILU_MUL row tiles
// come in pairs, rows r to r + 15 and n / 2 + r to n / 2 + r + 15; a CTA computes both of a pair at the same time (WARPS_N is
// even).
//
// Accumulators are float32 and added in a fixed order: every run returns the same bits.
//
// With EXPERTS (rows.cuh) the weight is a stack of experts, and the caller chooses the tokens of a CTA.
//
// A format defines a type Tiles, its weight:
//   kTileBytes                        of a stage in shared memory
//   Expander(tile, lane)              made of a tile's address in shared memory; expand<step>(fragment) is called step by step
//   kFinds                            whether a tile's offset has to be loaded first
//   find(index), find_none()          if so: begins to load the offset of tile `index`, or of none, a tile ahead of its copy
//   copy(to, index, exists, lane)     issues the copies of tile `index`, or of the one found last, if it exists
//
// Macros: SCALAR (__half or __nv_bfloat16), TILE_M (1, 8, 16, 32 or 64), WARPS_N, WARPS_K, STAGES, EXPERTS, and those of fusion.cuh.

#pragma once

#include "arrive_warp.cuh"
#include "ptx/bar.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "stage_x.cuh"
#include "tile_decode/copy_tile.cuh"
#include "tile_decode/partials.cuh"
#include "tile_decode/x_tile.cuh"

constexpr int kRowTileThreads = WARPS_K * kWarpSize;
constexpr int kWarps = WARPS_N * WARPS_K;

static_assert(!SILU_MUL || WARPS_N % 2 == 0, "a CTA has both row tiles of a pair");
static_assert(!EXPERTS || !(RMS_NORM || ADD_RESIDUAL), "experts fuse SiLU alone");
static_assert(kFused || WARPS_N == 1 || WARPS_K <= 15, "each K slice has a named barrier of its own, 1 to 15");

// Multiplies a tile of weights with a tile of x.
template <int step = 0, typename TileExpander>
__device__ __forceinline__ void mma_tile(Accumulators& accumulators, TileExpander& tile, const XFragments& x,
                                         uint4 (&units)[kTokenGroups]) {
    Word weights[4];
    tile.template expand<step>(weights);
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
        if (step % 2 == 0) units[i] = ld_shared_v4(x.blocks[i] ^ step * 8);
        mma_m16n8k16(accumulators[step % kChains][i], weights, step % 2 ? units[i].z : units[i].x,
            step % 2 ? units[i].w : units[i].y, static_cast<const SCALAR*>(nullptr));
    }
    if constexpr (step + 1 < kSteps) mma_tile<step + 1>(accumulators, tile, x, units);
}

// Synchronises the warps that share the ring of x tiles of a K slice; in a fused kernel none do.
__device__ __forceinline__ void sync_slice(int slice) {
    if (kFused || WARPS_N == 1) __syncwarp();
    else bar_sync<WARPS_N * kWarpSize>(1 + slice);
}

// A warp's two rings: the weight tiles of its K slice, for one group of WARPS_N row tiles after another, and the slice's x tiles.
template <typename Tiles>
struct WarpPipeline {
    Tiles tiles;
    XLoader x;
    Word weight_ring, x_ring;    // shared-memory addresses
    int x_bytes, row_tiles, column_tiles, stride, warp_n, slice, lane;
    int group, column;           // of the next copy: the first row tile of the group, and the column tile

    __device__ __forceinline__ bool exists() const { return group + warp_n < row_tiles; }

    // The number of the next tile, in the order of memory.
    __device__ __forceinline__ long long index() const {
        return static_cast<long long>(row_tile_of(group + warp_n, row_tiles)) * column_tiles + column;
    }

    __device__ __forceinline__ void advance() {
        column += WARPS_K;
        if (column >= column_tiles) column = slice, group += stride;
        if constexpr (Tiles::kFinds) find();
    }

    // Begins to load where the next tile is.
    __device__ __forceinline__ void find() {
        if (exists()) tiles.find(index());
        else tiles.find_none();
    }

    __device__ __forceinline__ void copy_weights(int stage) const {
        tiles.copy(weight_ring + stage * Tiles::kTileBytes, index(), exists(), lane);
    }

    // Refills a stage. Its x tile, of column tile `held`, is kept if the next tile is in the same columns.
    __device__ __forceinline__ void refill(int stage, int held) {
        if (!kFused && group < row_tiles && column != held) x.copy(x_ring + stage * x_bytes, column, warp_n, lane);
        copy_weights(stage);
        cp_async_commit_group();
        advance();
    }

    // Fills all stages; a fused kernel has no ring of x tiles.
    __device__ __forceinline__ void fill() {
        if constexpr (Tiles::kFinds) return fill_found();
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) {
            // x goes first, so that it does not queue behind the weights: 8.1 us, else 8.8 (32:64, 4096 x 4096).
            if constexpr (!kFused)
                if (group < row_tiles) x.copy(x_ring + i * x_bytes, column, warp_n, lane);
            copy_weights(i);
            cp_async_commit_group();
        }
    }

    // The same, but all offsets are requested before the first copy waits for its own.
    __device__ __forceinline__ void fill_found() {
        Tiles found[STAGES];
        const int first_group = group, first_column = column;
        find();
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) found[i] = tiles;
#pragma unroll
        for (int i = 0, at = first_column, of = first_group; i < STAGES; ++i) {
            if (!kFused && of < row_tiles) x.copy(x_ring + i * x_bytes, at, warp_n, lane);
            found[i].copy(weight_ring + i * Tiles::kTileBytes, 0, true, lane);
            cp_async_commit_group();
            at += WARPS_K;
            if (at >= column_tiles) at = slice, of += stride;
        }
    }

    // Fills all stages: the weights before griddepcontrol.wait, x after it. The first cp.async group holds the weights of all
    // stages and the first x tile.
    __device__ __forceinline__ void fill_around_wait() {
        WarpPipeline of_x = *this;
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) copy_weights(i);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
#pragma unroll
        for (int i = 0; i < STAGES; ++i, of_x.advance()) {
            if (of_x.group < row_tiles) of_x.x.copy(x_ring + i * x_bytes, of_x.column, warp_n, lane);
            cp_async_commit_group();
        }
    }
};

// The kernel's operands.
template <typename Tiles>
struct Operands {
    const SCALAR* x;             // [m, k]
    Tiles tiles;
    const SCALAR* bias;          // [n] or null
    const SCALAR* norm_weight;   // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual;      // [m, n] with ADD_RESIDUAL
    SCALAR* y;                   // [m, n], or [m, n / 2] with SILU_MUL
    Rows rows;
    int m, n, k, row_tiles, column_tiles;
    int x_aligned;               // whether every row of x begins at a multiple of 16 bytes
    float epsilon;
    bool weights_first;          // with EXPERTS: whether decode() executes griddepcontrol.wait, between the first weights and x
};

// Computes y. `shared` is the dynamic shared memory.
template <typename Tiles>
__device__ __forceinline__ void decode(const Operands<Tiles>& operands, unsigned char* shared) {
    const auto [x, tiles, bias, norm_weight, residual, y, rows, m, n, k, row_tiles, column_tiles, x_aligned, epsilon,
                weights_first] = operands;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int warp_n = warp / WARPS_K;
    const int slice = warp % WARPS_K;
    const int stride = gridDim.x * WARPS_N;
    const int first_group = blockIdx.x * WARPS_N;
    const int x_bytes = m * kTokenBytes;
    const Word x_rings = smem_address(shared) + kWarps * STAGES * Tiles::kTileBytes;
    const int x_tiles = kFused ? column_tiles : WARPS_K * STAGES;
    Partial* partials = reinterpret_cast<Partial*>(shared + kWarps * STAGES * Tiles::kTileBytes + x_tiles * x_bytes);
    WarpPipeline<Tiles> pipeline{tiles, XLoader{x, rows, m, k, x_aligned != 0}, smem_address(shared) + warp * STAGES * Tiles::kTileBytes,
                          x_rings + slice * STAGES * x_bytes, x_bytes, row_tiles, column_tiles, stride, warp_n, slice, lane,
                          first_group, slice};
    if (!EXPERTS) griddepcontrol_launch_dependents();
    if constexpr (!kFused) {
        if (!EXPERTS) griddepcontrol_wait();
        if (EXPERTS && weights_first) pipeline.fill_around_wait();
        else pipeline.fill();
    } else if constexpr (EXPERTS) {
        // x is copied before the weights: after them it arrived 3 us later, and a layer of one token took 23.8 us
        // (Qwen3-30B-A3B, H200).
        copy_all_x(pipeline.x, x_rings, m, column_tiles);
        cp_async_commit_group();
        pipeline.fill();
        cp_async_wait_group<STAGES>();
        end_copies_for_racecheck();
        __syncthreads();
    } else {
        const XStage<kWarps, TILE_M> stage(norm_weight, m, k);
        pipeline.fill();
        end_copies_for_racecheck();
        if (!EXPERTS) griddepcontrol_wait();
        stage.copy(x, rows, column_tiles * kWarpSize, epsilon, [&](int token, int unit) {
            return XLoader::unit_address(x_rings + unit / kWarpSize * x_bytes, token, unit % kWarpSize);
        });
    }

    constexpr int kSharing = SILU_MUL ? 2 : 1;  // row tiles whose warps share one set of outputs
    const int first_warp = warp - slice - warp_n % kSharing * WARPS_K;
    int stage = 0, parity = 0;
    for (int group = first_group; group < row_tiles; group += stride, parity ^= 1) {
        Accumulators accumulators = {};
        const int first_row = (group + warp_n) / kSharing * kTileRows, index = (warp - first_warp) * kWarpSize + lane;
        const float first_residual = residual_at(residual, index, m, n, first_row);
#pragma unroll 1
        for (int column = slice; column < column_tiles; column += WARPS_K) {
            wait_tiles<STAGES - 1>();
            sync_slice(slice);
            if (group + warp_n < row_tiles) {
                typename Tiles::Expander tile(pipeline.weight_ring + stage * Tiles::kTileBytes, lane);
                const Word x_tile = kFused ? x_rings + column * x_bytes : pipeline.x_ring + stage * x_bytes;
                const XFragments fragments(x_tile, m, lane);
                uint4 units[kTokenGroups];
                mma_tile(accumulators, tile, fragments, units);
            }
            sync_slice(slice);
            pipeline.refill(stage, column);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        Partial* of_group = partials + parity * kWarps;
        store_partial(of_group[warp], accumulators, m, lane);
        __syncthreads();
        reduce_slices(of_group + first_warp, bias, residual, first_residual, y, rows, m, n, first_row, index,
                      kSharing * kRowTileThreads);
    }
}
