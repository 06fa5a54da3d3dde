// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and m of 1 to TILE_M.
//
// Grid: 1-D, persistent CTAs. CTA: WARPS_N x WARPS_K warps. The WARPS_K warps of a row tile (16 rows of w) split its column
// tiles among them (sliced-K). The CTA computes WARPS_N row tiles at a time and strides over all row tiles of w.
//
// A warp expands a tile into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand. Tokens are the 8 columns of
// the other operand, so 8 tokens take the same number of mma as 1. A row of a tile has 4 blocks of 64 columns; lane 4 g + t expands block t
// of rows g and g + 8. A k-step takes 4 columns of each block, so the 16 columns of a fragment are a permutation of K, which x's
// fragments follow.
//
// Dynamic shared memory, in bytes:
//   WARPS_N * WARPS_K rings of STAGES weight tiles          kTileBytes each
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
// Bound by latency at one or two tiles per warp (4096 x 4096, m = 1; ncu: DRAM 42 %, ALU 45 %, issue slots 46 %; 8.2 us,
// its bytes take 4.4 at the measured bandwidth), by memory at 28672 x 8192 (DRAM 78 % by ncu; by time .82 to .92 of the
// measured bandwidth, in two sets of runs). README.md and docs/kernels/bitmask.md have the figures.
//
// With EXPERTS (rows.cuh) the weight is a stack of experts. blockIdx.y is the expert or, if TILE_M is 1, the pair of a token
// and an expert; blockIdx.x is as above, over the expert's row tiles. CTAs of an expert that no token chose end at once. If an
// expert has more than TILE_M pairs, its CTAs multiply them TILE_M at a time. A kernel without SILU_MUL copies its first weights
// before griddepcontrol.wait if `settled`: the choice of experts was complete before the kernel could start.
//
// Macros: SCALAR (__half or __nv_bfloat16), KEEP (values or codes per block of 64 columns), BITS (per code; 0 for values), TILE_M (1, 8, 16, 32
// or 64), WARPS_N, WARPS_K, STAGES, EXPERTS, and those of fusion.cuh.

#include "arrive_warp.cuh"
#include "ptx/bar.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "rows.cuh"
#include "stage_x.cuh"
#include "tile.cuh"
#include "types.cuh"

constexpr int kRowTileThreads = WARPS_K * kWarpSize;
constexpr int kUnit = 8;                        // values of x in 16 bytes: two k-steps of a lane
constexpr int kTokenBytes = kTileColumns * 2;   // per token of an x tile
constexpr int kTokenGroups = (TILE_M + 7) / 8;  // mma operands of 8 tokens
constexpr int kChains = TILE_M > 16 ? 1 : 2;    // accumulators per output: two hide mma latency at few tokens
constexpr int kWarps = WARPS_N * WARPS_K;

static_assert(!SILU_MUL || WARPS_N % 2 == 0, "a CTA has both row tiles of a pair");
static_assert(!EXPERTS || !(RMS_NORM || ADD_RESIDUAL), "experts fuse SiLU alone");
static_assert(kFused || WARPS_N == 1 || WARPS_K <= 15, "each K slice has a named barrier of its own, 1 to 15");

// The swizzle of an x tile: XORed to the address of a lane's block, so that the 16-byte units that a quarter-warp reads (of
// four blocks, for two tokens) fall into different banks.
__device__ __forceinline__ int swizzle(int block, int token) { return (block + token % 2 * 4) * 16; }

// Copies tiles of x to shared memory.
struct XLoader {
    const SCALAR* x;  // [m, k]
    Rows rows;
    int m, k;
    bool aligned;     // whether every row of x begins at a multiple of 16 bytes

    // Copies a column tile of every WARPS_N-th token from `first` on, 16 bytes per lane; columns from k on become zeros.
    __device__ __forceinline__ void copy(Word to, int column_tile, int first, int lane) const {
        const int column = column_tile * kTileColumns + lane * kUnit;
        const int left = min(max(k - column, 0), kUnit);
        const SCALAR* row_0 = x + (left ? column : 0);
        const SCALAR* from = row_0 + static_cast<long long>(first) * k;
        if (aligned) {
#pragma unroll
            for (int i = 0; i < TILE_M; i += WARPS_N, from += WARPS_N * static_cast<long long>(k))
                if (first + i < m) cp_async_16(unit_address(to, first + i, lane), row_of(row_0, from, first + i), left * 2);
            return;
        }
#pragma unroll 1
        for (int token = first; token < m; token += WARPS_N, from += WARPS_N * static_cast<long long>(k))
            copy_values(unit_address(to, token, lane),
                        reinterpret_cast<const unsigned short*>(row_of(row_0, from, token)), left);
    }

    // Where this lane's columns of a token's x begin: at `next`, which the caller advances, or with EXPERTS in the row of x that
    // `rows` names. `row_0` is their place in row 0.
    __device__ __forceinline__ const SCALAR* row_of(const SCALAR* row_0, const SCALAR* next, int token) const {
        return EXPERTS ? row_0 + rows.x(token) * k : next;
    }

    static __device__ __forceinline__ Word unit_address(Word tile, int token, int lane) {
        return tile + token * kTokenBytes + (lane * 16 ^ swizzle(lane / 8, token));
    }

    static __device__ __forceinline__ void copy_values(Word to, const unsigned short* from, int left) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const unsigned short value = i < left ? *const_cast<const volatile unsigned short*>(from + i) : 0;
            st_shared_u16(to + 2 * i, value);
        }
    }
};

// For lane 4 g + t: the addresses of the first 16 bytes of block t, for tokens g, g + 8 ... of an x tile. Tokens from m on repeat
// the last one; their accumulators are not stored.
struct XFragments {
    Word blocks[kTokenGroups];

    __device__ __forceinline__ XFragments(Word tile, int m, int lane) {
#pragma unroll
        for (int i = 0; i < kTokenGroups; ++i) {
            const int token = min(lane / 4 + 8 * i, m - 1);
            blocks[i] = tile + token * kTokenBytes + lane % 4 * kBlockColumns * 2 + swizzle(lane % 4, token);
        }
    }
};

using Accumulators = float[kChains][kTokenGroups][4];

// Multiplies a tile of weights with a tile of x.
template <int step = 0>
__device__ __forceinline__ void mma_tile(Accumulators& accumulators, TileExpander& tile, const XFragments& x,
                                         uint4 (&units)[kTokenGroups]) {
    const uint2 a = tile.upper.expand<step>();
    const uint2 b = tile.lower.expand<step>();
    const Word weights[4] = {a.x, b.x, a.y, b.y};
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
        if (step % 2 == 0) units[i] = ld_shared_v4(x.blocks[i] ^ step * 8);
        mma_m16n8k16(accumulators[step % kChains][i], weights, step % 2 ? units[i].z : units[i].x,
            step % 2 ? units[i].w : units[i].y, static_cast<const SCALAR*>(nullptr));
    }
    if constexpr (step + 1 < kSteps) mma_tile<step + 1>(accumulators, tile, x, units);
}

using Partial = float[TILE_M][kTileRows];  // a warp's accumulators in shared memory

// Lane 4 * g + t holds rows g and g + 8 of tokens 2 t and 2 t + 1.
__device__ __forceinline__ void store_partial(Partial& partial, const Accumulators& accumulators, int m, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenGroups; ++i) {
        const int token = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const float sum = accumulators[0][i / 4][i % 4] + (kChains > 1 ? accumulators[kChains - 1][i / 4][i % 4] : 0.0f);
        if (token < m) partial[token][lane / 4 + i / 2 % 2 * 8] = sum;
    }
}

// The `index`-th row tile in the order in which CTAs take them: with SILU_MUL the two tiles of a pair follow each other.
__device__ __forceinline__ int row_tile_of(int index, int row_tiles) {
    return SILU_MUL ? index / 2 + index % 2 * (row_tiles / 2) : index;
}

// What ADD_RESIDUAL adds to output `i` of a row tile.
__device__ __forceinline__ float residual_at(const SCALAR* residual, int i, int m, int n, int first_row) {
    const int token = i / kTileRows, row = first_row + i % kTileRows;
    return ADD_RESIDUAL && token < m && row < n ? to_float(residual[static_cast<long long>(token) * n + row]) : 0.0f;
}

// Adds the partials of the K slices of a row tile, or of a pair of row tiles, and stores y. `index` numbers this thread among
// the `threads` that share the outputs; `first_residual` is the residual of its first output, which was loaded early.
__device__ __forceinline__ void reduce_slices(const Partial* partials, const SCALAR* bias, const SCALAR* residual,
                                              float first_residual, SCALAR* y, Rows y_rows, int m, int n, int first_row,
                                              int index, int threads) {
    const int rows = SILU_MUL ? n / 2 : n;
#pragma unroll 1
    for (int i = index; i < m * kTileRows; i += threads) {
        const int row = first_row + i % kTileRows;
        if (row >= rows) continue;
        const long long at = y_rows.y(i / kTileRows) * rows + row;
        float sum = bias ? to_float(bias[row]) : 0.0f, up = SILU_MUL && bias ? to_float(bias[rows + row]) : 0.0f;
        const float added = i == index ? first_residual : residual_at(residual, i, m, n, first_row);
#pragma unroll
        for (int slice = 0; slice < WARPS_K; ++slice) {
            sum += partials[slice][i / kTileRows][i % kTileRows];
            if (SILU_MUL) up += partials[WARPS_K + slice][i / kTileRows][i % kTileRows];
        }
        if (SILU_MUL) sum = silu_mul(sum, up);
        if (ADD_RESIDUAL) sum = added + rounded(sum);
        store(y + at, sum);
    }
}

// Synchronises the warps that share the ring of x tiles of a K slice; in a fused kernel none do.
__device__ __forceinline__ void sync_slice(int slice) {
    if (kFused || WARPS_N == 1) __syncwarp();
    else bar_sync<WARPS_N * kWarpSize>(1 + slice);
}

// A warp's two rings: the weight tiles of its K slice, for one group of WARPS_N row tiles after another, and the slice's x tiles.
struct WarpPipeline {
    const unsigned char* tiles;
    XLoader x;
    Word weight_ring, x_ring;    // shared-memory addresses
    int x_bytes, row_tiles, column_tiles, stride, warp_n, slice, lane;
    int group, column;           // of the next copy: the first row tile of the group, and the column tile

    __device__ __forceinline__ void advance() {
        column += WARPS_K;
        if (column >= column_tiles) column = slice, group += stride;
    }

    __device__ __forceinline__ void copy_weights(int stage) const {
        const long long index = static_cast<long long>(row_tile_of(group + warp_n, row_tiles)) * column_tiles + column;
        if (group + warp_n < row_tiles) copy_tile(weight_ring + stage * kTileBytes, tiles + index * kTileBytes, lane);
    }

    // Refills a stage. Its x tile, of column tile `held`, is kept if the next tile is in the same columns.
    __device__ __forceinline__ void refill(int stage, int held) {
        if (!kFused && group < row_tiles && column != held) x.copy(x_ring + stage * x_bytes, column, warp_n, lane);
        copy_weights(stage);
        cp_async_commit_group();
        advance();
    }

    // Fills all stages.
    __device__ __forceinline__ void fill() {
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) {
            // x goes first, so that it does not queue behind the weights: 8.1 us, else 8.8 (4096 x 4096).
            if (group < row_tiles) x.copy(x_ring + i * x_bytes, column, warp_n, lane);
            copy_weights(i);
            cp_async_commit_group();
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

    // Fills all stages of a fused kernel, which has no ring of x tiles.
    __device__ __forceinline__ void fill_weights() {
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) {
            copy_weights(i);
            cp_async_commit_group();
        }
    }
};

// Copies all column tiles of x, in units of 16 bytes, by all threads. Needs k in multiples of 8
// and rows of x at multiples of 16 bytes. Units from column k on become zeros.
__device__ __forceinline__ void copy_all_x(const XLoader& loader, Word x_tiles, int m, int column_tiles) {
    for (int i = threadIdx.x; i < column_tiles * kWarpSize; i += kWarps * kWarpSize) {
        const bool within = i * kUnit < loader.k;
        for (int token = 0; token < m; ++token)
            cp_async_16(XLoader::unit_address(x_tiles + i / kWarpSize * m * kTokenBytes, token, i % kWarpSize),
                        loader.x + loader.rows.x(token) * loader.k + (within ? i * kUnit : 0), within ? 16 : 0);
    }
}

// The kernel's operands.
struct Operands {
    const SCALAR* x;             // [m, k]
    const unsigned char* tiles;  // [row_tiles, column_tiles, kTileBytes]
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
__device__ __forceinline__ void decode(const Operands& operands, unsigned char* shared) {
    const auto [x, tiles, bias, norm_weight, residual, y, rows, m, n, k, row_tiles, column_tiles, x_aligned, epsilon,
                weights_first] = operands;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int warp_n = warp / WARPS_K;
    const int slice = warp % WARPS_K;
    const int stride = gridDim.x * WARPS_N;
    const int first_group = blockIdx.x * WARPS_N;
    const int x_bytes = m * kTokenBytes;
    const Word x_rings = smem_address(shared) + kWarps * STAGES * kTileBytes;
    const int x_tiles = kFused ? column_tiles : WARPS_K * STAGES;
    Partial* partials = reinterpret_cast<Partial*>(shared + kWarps * STAGES * kTileBytes + x_tiles * x_bytes);
    WarpPipeline pipeline{tiles, XLoader{x, rows, m, k, x_aligned != 0}, smem_address(shared) + warp * STAGES * kTileBytes,
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
        pipeline.fill_weights();
        cp_async_wait_group<STAGES>();
        end_copies_for_racecheck();
        __syncthreads();
    } else {
        const XStage<kWarps, TILE_M> stage(norm_weight, m, k);
        pipeline.fill_weights();
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
                TileExpander tile(pipeline.weight_ring + stage * kTileBytes, lane);
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

#if EXPERTS
extern "C" __global__ void __launch_bounds__(WARPS_N * kRowTileThreads, 1) semisparse_bitmask_experts(
    const SCALAR* x,                          // [pairs / pairs_per_x, k]
    const unsigned char* __restrict__ tiles,  // [experts * row_tiles, column_tiles, kTileBytes]
    const SCALAR* bias,                       // [experts * n] or null
    SCALAR* y,                                // [pairs, n], or [pairs, n / 2] with SILU_MUL
    const long long* chosen,                  // [pairs], the expert of each pair
    int pairs, int pairs_per_x, int experts,
    int n, int k, int row_tiles, int column_tiles,  // of an expert
    int x_aligned,                                  // whether every row of x begins at a multiple of 16 bytes
    int settled                                     // whether `chosen` was complete before this kernel could start
) {
    extern __shared__ __align__(256) unsigned char shared[];
    const bool weights_first = settled && !kFused;
    if (!weights_first) {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
    const Pairs<TILE_M> step{chosen, pairs, pairs_per_x, experts};
    const long long expert = step.expert();
    Operands operands{x, tiles + expert * row_tiles * column_tiles * kTileBytes, bias ? bias + expert * n : nullptr, nullptr,
                      nullptr, y, {}, 1, n, k, row_tiles, column_tiles, x_aligned, 0.0f, weights_first};
    if constexpr (TILE_M == 1) {
        if (expert < 0 || expert >= experts) return;
        operands.rows = step.own();
        decode(operands, shared);
    } else {
        __shared__ int x_rows[TILE_M], y_rows[TILE_M];
        operands.rows.of_x = x_rows, operands.rows.of_y = y_rows;
        for (int begin = 0;; begin += TILE_M) {
            const int found = step.find(begin, x_rows, y_rows);
            if (found <= 0) return;
            operands.m = min(found, TILE_M);
            decode(operands, shared);
            if (found <= TILE_M) return;
            operands.weights_first = false;
            cp_async_wait_group<0>();
            __syncthreads();
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(WARPS_N * kRowTileThreads, 1) semisparse_bitmask_decode(
    // x and residual are not __restrict__: loads through const __restrict__ pointers may be moved before griddepcontrol.wait.
    const SCALAR* x,                          // [m, k]
    const unsigned char* __restrict__ tiles,  // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* bias,                       // [n] or null
    const SCALAR* norm_weight,                // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,                   // [m, n] with ADD_RESIDUAL
    SCALAR* y,                                // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k, int row_tiles, int column_tiles,
    int x_aligned,                            // whether every row of x begins at a multiple of 16 bytes
    float epsilon
) {
    extern __shared__ __align__(256) unsigned char shared[];
    decode({x, tiles, bias, norm_weight, residual, y, {}, m, n, k, row_tiles, column_tiles, x_aligned, epsilon, false},
           shared);
}
#endif
