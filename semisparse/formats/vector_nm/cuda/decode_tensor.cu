// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for 1 to 16 tokens on tensor cores (mma.m16n8k16), straight from kept vectors.
//
// Reads: the tensors of README.md, "Layout".
// Grid: row tiles of TILE_N rows; for more than one token at most as many CTAs as SMs, each of which computes several row
// tiles.
// CTA: WARPS warps. Shared memory: weights [WARPS, STAGES, 32 slots, TILE_N], a panel of x, partial sums [WARPS, TILE_M,
// TILE_N], for one token an exchange buffer of 64 bytes per warp.
// Warps: each takes every WARPS-th tile of 32 slots of the CTA's row tile, and copies STAGES tiles ahead (cp.async). Rows
// are the m of the mma, tokens its n, slots its k. A slot's rows lie side by side, so the weights are transposed on their
// way to registers (ldmatrix.trans). A panel holds columns of x with the tokens of each side by side, so ldmatrix.trans
// gathers the columns of 32 slots by their addresses. Partial sums are float32, added over the warps in a fixed order:
// every run gives the same bits.
// A fused kernel (fusion.cuh) with RMS_NORM has all of x in one panel, and every CTA normalises it. With SILU_MUL half of the
// warps compute a row tile of the gate, the other half that of the up projection: one CTA has rows r and n / 2 + r.
// PDL: a fused kernel issues the copies of its first weights before griddepcontrol.wait; others read nothing before it. The
// next kernel may launch once the first copies are issued.
// Bound: latency: the time until the first byte arrives, and the time after the last one. One token at 4096 x 4096, 16:32v32
// takes 7.5 us in isolated launches (H200); ncu: DRAM busy for 43 %, issue 24 %, shared memory 17 %. At 28672 x 8192: DRAM,
// 56.9 us (results/h200/sweeps/nm-decode-tensor.csv).
//
// Macros: SCALAR (__half or __nv_bfloat16, of x, w, bias and y), KEEP, WINDOW, LENGTH, TILE_N (16 or 32), TILE_M (1, 8 or
// 16), WARPS, STAGES, CTAS_PER_SM (for the register limit), and what fusion.cuh takes.

#include "fusion.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = WARPS * kWarp;
constexpr int kTilesAtOnce = SILU_MUL ? 2 : 1;          // row tiles that a CTA computes at the same time
constexpr int kSliceWarps = WARPS / kTilesAtOnce;       // warps per row tile, which split its slots among them
constexpr int kChunk = 8;                               // 16-bit values in 16 bytes
constexpr int kChunkBytes = 16;
constexpr int kTileSlots = 32;
constexpr int kChunksPerSlot = TILE_N / kChunk;
constexpr int kSlotsPerPass = kWarp / kChunksPerSlot;   // slots that a warp copies at once
constexpr int kPasses = kTileSlots / kSlotsPerPass;
constexpr int kTileBytes = kTileSlots * TILE_N * 2;
constexpr int kM16Tiles = TILE_N / 16;
constexpr int kN8Tiles = TILE_M > 8 ? 2 : 1;
constexpr int kN8Tokens = TILE_M > 8 ? 8 : TILE_M;      // tokens of an n8 tile
constexpr int kRowTilesPerGroup = LENGTH / TILE_N;
constexpr bool kSingleToken = TILE_M == 1;              // a column is then one number, broadcast to the n8 tile
constexpr int kColumnBytes = kSingleToken ? 2 : kChunkBytes;
constexpr bool kXFirst = TILE_M <= 8 && !kFused;        // x is loaded before the weight: 7.46, not 7.96 us (4096 x 4096, M = 1)

static_assert(WARPS % kTilesAtOnce == 0, "both row tiles have as many warps");
static_assert(!RMS_NORM || kN8Tiles == 1, "a thread's items are chunks of one n8 tile");
static_assert(!ADD_RESIDUAL || TILE_M * TILE_N <= kThreads, "a thread loads the residual of one output");

using Accumulators = float[kM16Tiles][kN8Tiles][4];

constexpr const SCALAR* kScalar = nullptr;  // selects overloads by type

// The work of the grid. A row tile is computed in passes, one per panel of x. In a pass a warp multiplies up to `steps` tiles
// of kTileSlots slots each. `row_tiles` are those of y; with SILU_MUL w has twice as many.
struct Work {
    const SCALAR* values;            // [groups, slots, LENGTH]
    const unsigned char* positions;  // [groups, slots]
    int slots, row_tiles, panel_tiles, panels, slot_tiles, steps;
};

__device__ __forceinline__ int warp_index() { return threadIdx.x / kWarp; }

// The tile that a warp is at. Every other row tile takes the panels in reverse, so it begins with the panel that is already in
// shared memory.
struct TileIterator {
    int row_tile, pass, step;
    bool reverse;

    __device__ __forceinline__ int panel(const Work& work) const { return reverse ? work.panels - 1 - pass : pass; }
    __device__ __forceinline__ int slot_tile(const Work& work) const {
        return panel(work) * work.panel_tiles + step * kSliceWarps + warp_index() % kSliceWarps;
    }
    // The row tile of w that this warp multiplies.
    __device__ __forceinline__ int weight_tile(const Work& work) const {
        return row_tile + warp_index() / kSliceWarps * work.row_tiles;
    }
    __device__ __forceinline__ int first_column(const Work& work) const {
        return panel(work) * work.panel_tiles * kTileSlots / KEEP * WINDOW;
    }
    // Returns whether there is such a tile: a warp may have none in its last steps.
    __device__ __forceinline__ bool valid(const Work& work) const {
        return row_tile < work.row_tiles && slot_tile(work) < min((panel(work) + 1) * work.panel_tiles, work.slot_tiles);
    }
    __device__ __forceinline__ void next_row_tile() {
        pass = 0;
        reverse = !reverse;
        row_tile += gridDim.x;
    }
    __device__ __forceinline__ void advance(const Work& work) {
        if (++step < work.steps) return;
        step = 0;
        if (++pass == work.panels) next_row_tile();
    }
};

// Returns the value that a chunk's index in its slot is XORed with: the same rows of eight slots then lie in different banks.
__device__ __forceinline__ int swizzle(int slot) { return slot / (kChunk / kChunksPerSlot) % kChunksPerSlot; }

// Issues the copies of a tile. Returns the position of the lane's slot in its window, -1 past the last slot.
__device__ __forceinline__ int copy_tile(Word stage, const Work& work, const TileIterator& at) {
    const int lane = threadIdx.x % kWarp, first = at.slot_tile(work) * kTileSlots, left = work.slots - first;
    const int row_tile = at.weight_tile(work);
    const long long start = static_cast<long long>(row_tile / kRowTilesPerGroup) * work.slots + first;
    const int position = lane < left ? work.positions[start + lane] : -1;
    const SCALAR* from = work.values + (start + lane / kChunksPerSlot) * LENGTH + row_tile % kRowTilesPerGroup * TILE_N +
                         lane % kChunksPerSlot * kChunk;
    const Word to = stage + (lane / kChunksPerSlot * kChunksPerSlot +
                             (lane % kChunksPerSlot ^ swizzle(lane / kChunksPerSlot))) * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const bool inside = lane / kChunksPerSlot + i * kSlotsPerPass < left;
        cp_async_16(to + i * kWarp * kChunkBytes, from + i * kSlotsPerPass * LENGTH, inside ? kChunkBytes : 0);
    }
    return position;
}

// Returns a column's byte offset in the panel. Swizzled: eight columns, eight apart, are written without bank conflicts.
__device__ __forceinline__ Word panel_offset(Word column) {
    return kSingleToken ? column * kColumnBytes : (column ^ column / kChunk % kChunk) * kColumnBytes;
}

using XFragments = Word[kN8Tiles][4];  // x for a tile: its slots 0 to 7, 8 to 15, 16 to 23, 24 to 31

// Loads the fragments of a single token: each lane reads x for one slot. Through the exchange buffer it gets x for eight: slots
// 2 t and 2 t + 1 of every eight, t = lane % 4.
__device__ __forceinline__ void load_single_token(Word (&x)[4], const char* panel, char* exchange, Word column) {
    const int lane = threadIdx.x % kWarp;
    __syncwarp();
    reinterpret_cast<SCALAR*>(exchange)[lane / 2 % 4 * 8 + lane / 8 * 2 + lane % 2] =
        reinterpret_cast<const SCALAR*>(panel)[column];
    __syncwarp();
    const uint4 eight = reinterpret_cast<const uint4*>(exchange)[lane % 4];
    x[0] = eight.x, x[1] = eight.y, x[2] = eight.z, x[3] = eight.w;
}

__device__ __forceinline__ void load_x(XFragments& x, int position, char* panel, char* exchange, Word n8_bytes, int first_slot,
                                       int first_column) {
    const int column = (first_slot + static_cast<int>(threadIdx.x % kWarp)) / KEEP * WINDOW + position - first_column;
    const int inside = position < 0 ? 0 : column;  // past the last slot any column will do: the weights are zeros
    if constexpr (kSingleToken) {
        load_single_token(x[0], panel, exchange, inside);
    } else {
        const Word from = smem_address(panel) + panel_offset(inside);
#pragma unroll
        for (int n8 = 0; n8 < kN8Tiles; ++n8) ldmatrix_x4_trans(x[n8], from + n8 * n8_bytes);
    }
}

__device__ __forceinline__ void multiply(Accumulators& d, Word stage, const XFragments& x) {
    const int lane = threadIdx.x % kWarp;
    const int slot = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
    const Word rows = stage + (slot * kChunksPerSlot + (chunk ^ swizzle(slot))) * kChunkBytes;
#pragma unroll
    for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
        for (int m16 = 0; m16 < kM16Tiles; ++m16) {
            Word w[4];
            ldmatrix_x4_trans(w, (rows ^ m16 * 2 * kChunkBytes) + k16 * 16 * kChunksPerSlot * kChunkBytes);
#pragma unroll
            for (int n8 = 0; n8 < kN8Tiles; ++n8) mma_m16n8k16(d[m16][n8], w, x[n8][2 * k16], x[n8][2 * k16 + 1], kScalar);
        }
    }
}

// Loads eight values of a row of x, of which `left` are inside.
template <bool aligned>
__device__ __forceinline__ uint4 load_eight(const SCALAR* from, int left) {
    if (aligned) return left > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{};
    uint4 eight{};
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (i < left) reinterpret_cast<SCALAR*>(&eight)[i] = from[i];
    return eight;
}

// Copies panels of x to shared memory. A thread takes one item at a time: eight columns of the tokens of an n8 tile.
struct PanelLoader {
    const SCALAR* x;  // [m, k]
    int m, k, chunks;  // chunks of eight columns per panel
    Word n8_bytes;     // bytes of the panel per n8 tile of tokens

    template <bool aligned>
    __device__ __forceinline__ void load(uint4 (&eight)[kN8Tokens], int n8, int first, int chunk) const {
        const int column = first + chunk * kChunk, left = k - column;
#pragma unroll
        for (int i = 0; i < kN8Tokens; ++i) {
            const int token = n8 * kChunk + i;
            eight[i] = load_eight<aligned>(x + static_cast<long long>(token) * k + column, token < m ? left : 0);
        }
    }

    __device__ __forceinline__ void store(char* panel, const uint4 (&eight)[kN8Tokens], int n8, int chunk) const {
        if constexpr (kSingleToken) {
            reinterpret_cast<uint4*>(panel)[chunk] = eight[0];
            return;
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            uint4 column{};
#pragma unroll
            for (int token = 0; token < kN8Tokens; ++token)
                reinterpret_cast<SCALAR*>(&column)[token] = reinterpret_cast<const SCALAR*>(&eight[token])[i];
            *reinterpret_cast<uint4*>(panel + n8 * n8_bytes + panel_offset(chunk * kChunk + i)) = column;
        }
    }

    // Warps alternate between the n8 tiles.
    static __device__ __forceinline__ int n8_of(int item) { return item / kWarp % kN8Tiles; }
    static __device__ __forceinline__ int chunk_of(int item) { return item / (kWarp * kN8Tiles) * kWarp + item % kWarp; }

    // Copies the panel whose first column is `first`, zeros past column k and token m. The thread begins with its item `item`.
    template <bool aligned>
    __device__ __forceinline__ void copy(char* panel, int first, int item) const {
        const int items = (chunks + kWarp - 1) / kWarp * kWarp * kN8Tiles;
#pragma unroll 1
        for (; item < items; item += kThreads) {
            if (chunk_of(item) >= chunks) continue;
            uint4 eight[kN8Tokens];
            load<aligned>(eight, n8_of(item), first, chunk_of(item));
            store(panel, eight, n8_of(item), chunk_of(item));
        }
    }

    // Eight values of the norm's weight, zeros past column k.
    __device__ __forceinline__ uint4 load_norm(const SCALAR* norm_weight, int chunk) const {
        return load_eight<true>(norm_weight + chunk * kChunk, k - chunk * kChunk);
    }

    // Copies the only panel, normalised. `norm` holds the norm's weight of the thread's first chunk, loaded early; `sums` are
    // kN8Tokens * WARPS floats of shared memory. The chunk that a thread loads last stays in its registers.
    __device__ __forceinline__ void copy_normalised(char* panel, const SCALAR* norm_weight, uint4 norm, float epsilon,
                                                    float* sums) const {
        const int own = threadIdx.x, last = own + max(chunks - 1 - own, 0) / kThreads * kThreads;
        uint4 eight[kN8Tokens];
        float squares[kN8Tokens] = {};
#pragma unroll 1
        for (int chunk = own; chunk < chunks; chunk += kThreads) {
            load<true>(eight, 0, 0, chunk);
#pragma unroll
            for (int token = 0; token < kN8Tokens; ++token) {
                const uint4 unit = eight[token];
                squares[token] += squares_of(unit.x) + squares_of(unit.y) + squares_of(unit.z) + squares_of(unit.w);
            }
        }
#pragma unroll
        for (int token = 0; token < kN8Tokens; ++token) {
            if (token >= m) break;
            const float sum = warp_sum(squares[token]);
            if (own % kWarp == 0) sums[token * WARPS + warp_index()] = sum;
        }
        __syncthreads();
        float scales[kN8Tokens];
#pragma unroll
        for (int token = 0; token < kN8Tokens; ++token) {
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += token < m ? sums[token * WARPS + warp] : 0.0f;
            scales[token] = rsqrtf(sum / k + epsilon);
        }
#pragma unroll 1
        for (int chunk = last; chunk >= 0 && own < chunks; chunk -= kThreads) {
            if (chunk != last) load<true>(eight, 0, 0, chunk);
            const uint4 weight = chunk == own ? norm : load_norm(norm_weight, chunk);
#pragma unroll
            for (int token = 0; token < kN8Tokens; ++token) {
                const uint4 x_unit = eight[token];
                const float scale = scales[token];
                eight[token] = uint4{normalised(x_unit.x, weight.x, scale), normalised(x_unit.y, weight.y, scale),
                                     normalised(x_unit.z, weight.z, scale), normalised(x_unit.w, weight.w, scale)};
            }
            store(panel, eight, 0, chunk);
        }
    }
};

// A warp's tiles in flight.
struct Pipeline {
    Word base;              // address of stage 0
    TileIterator next;      // the next tile to copy
    int positions[STAGES];  // of the lane's slot in each stage

    __device__ __forceinline__ Word stage(int i) const { return base + i * kTileBytes; }

    __device__ __forceinline__ void refill(int i, const Work& work) {
        if (next.valid(work)) positions[i] = copy_tile(stage(i), work, next);
        cp_async_commit_group();
        next.advance(work);
    }
};

// Multiplies a warp's tiles of one panel.
__device__ __forceinline__ void multiply_panel(Accumulators& d, Pipeline& pipeline, TileIterator at, const Work& work,
                                               char* panel, char* exchange, Word n8_bytes) {
    const int first_column = at.first_column(work);
#pragma unroll 1
    for (int step = 0; step < work.steps; step += STAGES) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            at.step = step + i;
            const bool valid = at.valid(work);
            XFragments x;
            if (valid) {
                load_x(x, pipeline.positions[i], panel, exchange, n8_bytes, at.slot_tile(work) * kTileSlots, first_column);
            }
            cp_async_wait_group<STAGES - 1>();
            __syncwarp();
            if (valid) multiply(d, pipeline.stage(i), x);
            __syncwarp();
            pipeline.refill(i, work);
        }
    }
}

using Partial = float[TILE_M][TILE_N];  // a warp's partial sums

__device__ __forceinline__ void store_partial(Partial& partial, const Accumulators& d) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kM16Tiles * kN8Tiles * 4; ++i) {
        const int m16 = i / 4 / kN8Tiles, n8 = i / 4 % kN8Tiles, lower = i / 2 % 2;
        const int token = n8 * kChunk + lane % 4 * 2 + i % 2;
        const int row = m16 * 16 + lower * 8 + lane / 4;
        if (token < TILE_M) partial[token][row] = d[m16][n8][i % 4];
    }
}

// What ADD_RESIDUAL adds to output `i` of a row tile.
__device__ __forceinline__ float residual_at(const SCALAR* residual, int i, int m, int n, int first_row) {
    const int row = first_row + i % TILE_N;
    return ADD_RESIDUAL && i < m * TILE_N && row < n ? to_float(residual[static_cast<long long>(i / TILE_N) * n + row]) : 0.0f;
}

// Adds the warps' partial sums, and stores. `added` is the residual of the thread's output, which was loaded early.
__device__ __forceinline__ void epilogue(const Partial* partials, const SCALAR* bias, float added, SCALAR* y, int m, int n,
                                         int first_row) {
    const int rows = SILU_MUL ? n / 2 : n;
    for (int i = threadIdx.x; i < m * TILE_N; i += kThreads) {
        const int token = i / TILE_N, row = first_row + i % TILE_N;
        if (row >= rows) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f, up = SILU_MUL && bias ? to_float(bias[rows + row]) : 0.0f;
#pragma unroll
        for (int warp = 0; warp < kSliceWarps; ++warp) {
            sum += partials[warp][token][i % TILE_N];
            if (SILU_MUL) up += partials[kSliceWarps + warp][token][i % TILE_N];
        }
        if (SILU_MUL) sum = silu_mul(sum, up);
        if (ADD_RESIDUAL) sum = added + rounded(sum);
        store(y + static_cast<long long>(token) * rows + row, sum);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_vector_nm_decode_tensor(
    // Not __restrict__: the compiler could move loads that it takes for constants before griddepcontrol.wait.
    const SCALAR* x,                 // [m, k]
    const SCALAR* values,            // [groups, slots, LENGTH]
    const unsigned char* positions,  // [groups, slots]
    const SCALAR* bias,              // [n] or null
    const SCALAR* norm_weight,       // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,          // [m, n] with ADD_RESIDUAL
    SCALAR* y,                       // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k, int slots,
    int row_tiles,                   // of y
    int panel_tiles,                 // tiles of slots per panel of x
    int panel_chunks,                // chunks of eight columns per panel
    int panels,                      // number of panels that cover x
    int steps,                       // tiles per warp and panel, a multiple of STAGES
    int aligned,                     // whether the rows of x begin at multiples of 16 bytes; in a fused kernel they do
    float epsilon
) {
    extern __shared__ __align__(256) unsigned char shared[];
    const Work work{values, positions, slots, row_tiles, panel_tiles, panels, (slots + kTileSlots - 1) / kTileSlots, steps};
    const PanelLoader loader{x, m, k, panel_chunks, static_cast<Word>(panel_chunks * kChunk * kColumnBytes)};
    const int warp = warp_index();
    char* panel = reinterpret_cast<char*>(shared) + WARPS * STAGES * kTileBytes;
    Partial* partials = reinterpret_cast<Partial*>(panel + kN8Tiles * loader.n8_bytes);
    char* exchange = reinterpret_cast<char*>(partials + WARPS) + warp * kTileSlots * 2;

    TileIterator at{static_cast<int>(blockIdx.x), 0, 0, false};
    Pipeline pipeline{smem_address(shared) + warp * STAGES * kTileBytes, at};
    if constexpr (!kFused) griddepcontrol_wait();
    int item = threadIdx.x;
    uint4 eight[kN8Tokens];
    const bool x_first = kXFirst && aligned && PanelLoader::chunk_of(item) < panel_chunks;
    if (x_first) loader.load<true>(eight, PanelLoader::n8_of(item), 0, PanelLoader::chunk_of(item));
#pragma unroll
    for (int i = 0; i < STAGES; ++i) pipeline.refill(i, work);
    griddepcontrol_launch_dependents();
    uint4 norm{};
    if constexpr (RMS_NORM) norm = loader.load_norm(norm_weight, threadIdx.x);
    if constexpr (kFused) griddepcontrol_wait();
    if (x_first) {
        loader.store(panel, eight, PanelLoader::n8_of(item), PanelLoader::chunk_of(item));
        item += kThreads;
    }
    for (int loaded = -1; at.row_tile < row_tiles; at.next_row_tile()) {
        Accumulators d = {};
        const float added = residual_at(residual, threadIdx.x, m, n, at.row_tile * TILE_N);
        for (at.pass = 0; at.pass < panels; ++at.pass) {
            if (at.panel(work) != loaded) {
                if (loaded >= 0) __syncthreads();
                loaded = at.panel(work);
                if constexpr (RMS_NORM)
                    loader.copy_normalised(panel, norm_weight, norm, epsilon, reinterpret_cast<float*>(partials));
                else if (kFused || aligned) loader.copy<true>(panel, at.first_column(work), item);
                else loader.copy<false>(panel, at.first_column(work), item);
                item = threadIdx.x;
                __syncthreads();
            }
            multiply_panel(d, pipeline, at, work, panel, exchange, loader.n8_bytes);
        }
        store_partial(partials[warp], d);
        __syncthreads();
        epilogue(partials, bias, added, y, m, n, at.row_tile * TILE_N);
        __syncthreads();
    }
}
