// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for mask tiles and m of 1 to TILE_M.
//
// Grid: 1-D, persistent CTAs. CTA: WARPS_N x WARPS_K warps. The WARPS_K warps of a row tile (16 rows of w) split its column
// tiles among them (sliced-K). The CTA computes WARPS_N row tiles at a time and strides over all row tiles of w.
//
// A warp expands a tile into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand. Tokens are the 8 columns of
// the other operand, so 1 and 8 tokens take as many mma. A k-step is 4 columns of every lane's block: the 16 columns of a
// fragment are a permutation of K, which x's fragments follow.
//
// Dynamic shared memory, in bytes:
//   WARPS_N * WARPS_K rings of STAGES weight tiles          kTileBytes each
//   WARPS_K rings of STAGES x tiles, m tokens by 256 columns 512 m each; the WARPS_N warps of the same K slice share one;
//     in a fused kernel (fusion.cuh) all x tiles instead, once (stage_x.cuh)
//   accumulators of every warp, double-buffered              64 TILE_M each
// Both rings are filled with cp.async, STAGES tiles ahead. An x tile is not copied again where the columns stay the same.
//
// A fused kernel issues the copies of its first weight tiles before griddepcontrol.wait. With SILU_MUL row tiles come in
// pairs, rows r to r + 15 and n / 2 + r to n / 2 + r + 15; a CTA computes both of a pair at the same time (WARPS_N >= 2).
//
// Accumulators are float32 and added in a fixed order: every run returns the same bits.
//
// Macros: SCALAR (__half or __nv_bfloat16), WORDS (tile.cuh), TILE_M (1, 8 or 16), WARPS_N, WARPS_K, STAGES, and those of
// fusion.cuh.

#include "arrive_warp.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "stage_x.cuh"
#include "tile.cuh"
#include "types.cuh"

constexpr int kBlockColumns = 64;                   // of a row that a lane owns
constexpr int kSliceThreads = WARPS_K * kWarpSize;  // threads per row tile
constexpr int kUnit = 8;                            // values of x in 16 bytes: two k-steps of a lane
constexpr int kTokenBytes = kTileColumns * 2;       // per token of an x tile
constexpr int kTokenGroups = (TILE_M + 7) / 8;      // mma operands of 8 tokens
constexpr int kChains = 2;                           // accumulators per output: two hide mma latency
constexpr int kWarps = WARPS_N * WARPS_K;

static_assert(!SILU_MUL || WARPS_N % 2 == 0, "a CTA has both row tiles of a pair");
static_assert(kFused || WARPS_N == 1 || WARPS_K <= 15, "each K slice has a named barrier of its own, 1 to 15");

// Copies `bytes` of a tile to shared memory with cp.async, by all lanes of a warp.
template <int at = 0>
__device__ __forceinline__ void copy_tile(Word to, const unsigned char* from, int bytes, int lane) {
    if (at + lane * 16 < bytes) cp_async_16_at<at>(to + lane * 16, from + lane * 16);
    if constexpr (at + kWarpSize * 16 < kTileBytes) copy_tile<at + kWarpSize * 16>(to, from, bytes, lane);
}

// Waits for all but this lane's `pending` most recent cp.async groups, then for the other lanes' copies.
template <int pending>
__device__ __forceinline__ void wait_tiles() {
    cp_async_wait_group<pending>();
    __syncwarp();
}

// The swizzle of an x tile: XORed to the address of a lane's block, so that the eight lanes of a quarter-warp read (four blocks
// of two tokens) fall into different banks.
__device__ __forceinline__ int swizzle(int block, int token) { return (block + token % 2 * 4) * 16; }

// Copies tiles of x to shared memory.
struct XLoader {
    const SCALAR* x;  // [m, k]
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
                if (first + i < m) cp_async_16(unit_address(to, first + i, lane), from, left * 2);
            return;
        }
#pragma unroll 1
        for (int token = first; token < m; token += WARPS_N, from += WARPS_N * static_cast<long long>(k))
            copy_values(unit_address(to, token, lane), reinterpret_cast<const unsigned short*>(from), left);
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

// Addresses of unit 0 of a lane's block, for its tokens g, g + 8 ... of an x tile. Tokens from m on repeat the last one; their
// accumulators are not stored.
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
        const float sum = accumulators[0][i / 4][i % 4] + accumulators[1][i / 4][i % 4];
        if (token < m) partial[token][lane / 4 + i / 2 % 2 * 8] = sum;
    }
}

// The row tile of w at position `index` of the order in which CTAs stride over row tiles: with SILU_MUL pair by pair.
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
                                              float first_residual, SCALAR* y, int m, int n, int first_row,
                                              int index, int threads) {
    const int rows = SILU_MUL ? n / 2 : n;
#pragma unroll 1
    for (int i = index; i < m * kTileRows; i += threads) {
        const int row = first_row + i % kTileRows;
        if (row >= rows) continue;
        const long long at = static_cast<long long>(i / kTileRows) * rows + row;
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

// Where a tile begins and ends, in units of kUnitBytes.
struct Units {
    int begin, end;
};

// A warp's two rings: the weight tiles of its K slice, for one group of WARPS_N row tiles after another, and the slice's x tiles.
struct WarpPipeline {
    const unsigned char* tiles;
    const int* starts;
    XLoader x;
    Word weight_ring, x_ring;    // shared-memory addresses
    int x_bytes, row_tiles, column_tiles, stride, warp_n, slice, lane;
    int group, column;           // of the next tile to copy
    Units next = {};             // of that tile; none past the last row tile

    // Loads where the next tile is, one tile ahead of its copy, which would wait for it.
    __device__ __forceinline__ void find() {
        if (group + warp_n >= row_tiles) {
            next = Units{};
            return;
        }
        const int* at = starts + static_cast<long long>(row_tile_of(group + warp_n, row_tiles)) * column_tiles + column;
        next = Units{at[0], at[1]};
    }

    __device__ __forceinline__ void advance() {
        column += WARPS_K;
        if (column >= column_tiles) column = slice, group += stride;
        find();
    }

    __device__ __forceinline__ void copy_weights(int stage, Units units) const {
        copy_tile(weight_ring + stage * kTileBytes, tiles + static_cast<long long>(units.begin) * kUnitBytes,
                  (units.end - units.begin) * kUnitBytes, lane);
    }

    // Refills a stage. Its x tile, of column tile `held`, is kept if the next tile is in the same columns.
    __device__ __forceinline__ void refill(int stage, int held) {
        if (!kFused && group < row_tiles && column != held) x.copy(x_ring + stage * x_bytes, column, warp_n, lane);
        copy_weights(stage, next);
        cp_async_commit_group();
        advance();
    }

    // Fills all stages; a fused kernel has no ring of x tiles.
    __device__ __forceinline__ void fill() {
        Units units[STAGES];
        const int first_group = group, first_column = column;
        find();
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) units[i] = next;
#pragma unroll
        for (int i = 0, at = first_column, of = first_group; i < STAGES; ++i) {
            // x goes first, so that it does not queue behind the weights: 8.1 us, else 8.8 (bitmask, 4096 x 4096).
            if (!kFused && of < row_tiles) x.copy(x_ring + i * x_bytes, at, warp_n, lane);
            copy_weights(i, units[i]);
            cp_async_commit_group();
            at += WARPS_K;
            if (at >= column_tiles) at = slice, of += stride;
        }
    }
};

// The kernel's operands.
struct Operands {
    const SCALAR* x;             // [m, k]
    const unsigned char* tiles;  // [units, kUnitBytes]
    const int* starts;           // [row_tiles * column_tiles + 1], in units
    const SCALAR* bias;          // [n] or null
    const SCALAR* norm_weight;   // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual;      // [m, n] with ADD_RESIDUAL
    SCALAR* y;                   // [m, n], or [m, n / 2] with SILU_MUL
    int m, n, k, row_tiles, column_tiles;
    int x_aligned;               // whether every row of x begins at a multiple of 16 bytes
    float epsilon;
};

// Computes y. `shared` is the dynamic shared memory.
__device__ __forceinline__ void decode(const Operands& operands, unsigned char* shared) {
    const auto [x, tiles, starts, bias, norm_weight, residual, y, m, n, k, row_tiles, column_tiles, x_aligned, epsilon] = operands;
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
    WarpPipeline pipeline{tiles, starts, XLoader{x, m, k, x_aligned != 0}, smem_address(shared) + warp * STAGES * kTileBytes,
                          x_rings + slice * STAGES * x_bytes, x_bytes, row_tiles, column_tiles, stride, warp_n, slice, lane,
                          first_group, slice};
    griddepcontrol_launch_dependents();
    if constexpr (!kFused) {
        griddepcontrol_wait();
        pipeline.fill();
    } else {
        const XStage<kWarps, TILE_M> stage(norm_weight, m, k);
        pipeline.fill();
        end_copies_for_racecheck();
        griddepcontrol_wait();
        stage.copy(x, Rows{}, column_tiles * kWarpSize, epsilon, [&](int token, int unit) {
            return XLoader::unit_address(x_rings + unit / kWarpSize * x_bytes, token, unit % kWarpSize);
        });
    }

    constexpr int kSharing = SILU_MUL ? 2 : 1;  // row tiles whose warps store the same outputs
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
        reduce_slices(of_group + first_warp, bias, residual, first_residual, y, m, n, first_row, index,
                      kSharing * kSliceThreads);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS_N * kSliceThreads, 1) semisparse_ec_csr_decode_tiles(
    // x and residual are not __restrict__: loads through const __restrict__ pointers may be moved before griddepcontrol.wait.
    const SCALAR* x,                          // [m, k]
    const unsigned char* __restrict__ tiles,  // [units, kUnitBytes]
    const int* __restrict__ tile_starts,      // [row_tiles * column_tiles + 1], in units
    const SCALAR* bias,                       // [n] or null
    const SCALAR* norm_weight,                // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,                   // [m, n] with ADD_RESIDUAL
    SCALAR* y,                                // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k, int row_tiles, int column_tiles,
    int x_aligned,                            // whether every row of x begins at a multiple of 16 bytes
    float epsilon
) {
    extern __shared__ __align__(256) unsigned char shared[];
    decode({x, tiles, tile_starts, bias, norm_weight, residual, y, m, n, k, row_tiles, column_tiles, x_aligned, epsilon}, shared);
}
