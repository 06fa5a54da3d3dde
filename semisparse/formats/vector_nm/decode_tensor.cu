// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for few tokens on tensor cores, straight from the packed bytes.
//
// A strip is ROWS rows of a group, a tile 32 slots of it. A block takes strips in turn; its warps share out a strip's tiles, and
// each has STAGES of them on their way. A tile is the left operand of products of 16 rows and 16 slots, turned on its way to
// registers, because a slot's rows lie side by side. The right one are the slots' columns of x for eight tokens: panels of x lie in
// shared memory, the tokens of a column side by side, so that one load of matrices gathers 32 columns by their addresses. Sums
// are float32 and added in a fixed order: every run gives the same bits.
//
// A launch may begin before the kernel before it has ended: up to `wait_for_previous_kernel` only the weight is read.
//
// Compiled for SCALAR (half or bfloat16, of x, w, bias and y), KEEP, WINDOW, LENGTH, ROWS (16 or 32), TOKENS (1, 8 or 16), WARPS,
// STAGES.

#include "clusters.cuh"
#include "copies.cuh"
#include "dependent.cuh"
#include "matrices.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "scalars.cuh"

#ifndef REGISTERS
#define REGISTERS 0
#endif
#ifndef XFIRST
#define XFIRST 0
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef STAMPS
#define STAMPS 0
#endif

constexpr int kWarp = 32;
constexpr int kThreads = WARPS * kWarp;
constexpr int kUnit = 8;                         // 16-bit values in 16 bytes
constexpr int kUnitBytes = 16;
constexpr int kSlots = 32;                       // of a tile
constexpr int kParts = ROWS / kUnit;             // units of a slot
constexpr int kUnitsOfLane = kParts;             // of a tile
constexpr int kSpan = kWarp / kParts;            // slots that a warp copies at once
constexpr int kTileBytes = kSlots * ROWS * 2;
constexpr int kBands = ROWS / 16;                // of 16 rows
constexpr int kHalves = TOKENS > 8 ? 2 : 1;      // of eight tokens
constexpr int kLoaded = TOKENS > 8 ? 8 : TOKENS; // tokens of a half
constexpr int kStrips = LENGTH / ROWS;           // of a group
constexpr bool kOne = TOKENS == 1;               // then a column is a number, and products have it for all their tokens
constexpr int kColumnBytes = kOne ? 2 : kUnitBytes;

using Sums = float[kBands][kHalves][4];

__device__ __forceinline__ const SCALAR* kind() { return nullptr; }

// Which slots, of which strip, are where: a turn is a strip's share of a panel.
struct Plan {
    const SCALAR* values;            // [groups, total, LENGTH]
    const unsigned char* positions;  // [groups, total]
    int total, panel_tiles, panels, tiles, rounds;
};

// Where a warp is: its tiles of a turn one after another, then those of the block's next turn.
struct Cursor {
    int strip, panel, round;

    __device__ __forceinline__ int tile(const Plan& plan) const {
        return panel * plan.panel_tiles + round * WARPS + static_cast<int>(threadIdx.x) / kWarp;
    }
    __device__ __forceinline__ bool holds(const Plan& plan, int strips) const {
        return strip < strips && tile(plan) < min((panel + 1) * plan.panel_tiles, plan.tiles);
    }
    __device__ __forceinline__ void advance(const Plan& plan) {
        if (++round < plan.rounds) return;
        round = 0;
        if ((panel += SPLIT) < plan.panels) return;
        panel = blockIdx.x % SPLIT;
        strip += gridDim.x / SPLIT;
    }
};

// What a lane has of a tile on its way.
struct Held {
#if REGISTERS
    uint4 weights[kUnitsOfLane];
#endif
    int position;
};

// Units of eight slots and the same rows stand in banks of their own.
__device__ __forceinline__ int shuffled(int slot) { return slot / (kUnit / kParts) % kParts; }

__device__ __forceinline__ void ask(Held& held, Word place, const Plan& plan, const Cursor& at) {
    const int lane = threadIdx.x % kWarp, first = at.tile(plan) * kSlots, left = plan.total - first;
    const long long start = static_cast<long long>(at.strip / kStrips) * plan.total + first;
    held.position = lane < left ? plan.positions[start + lane] : -1;
    const SCALAR* from = plan.values + (start + lane / kParts) * LENGTH + at.strip % kStrips * ROWS + lane % kParts * kUnit;
    const Word to = place + (lane / kParts * kParts + (lane % kParts ^ shuffled(lane / kParts))) * kUnitBytes;
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) {
        const bool inside = lane / kParts + i * kSpan < left;
#if REGISTERS
        held.weights[i] = inside ? read_once(from + i * kSpan * LENGTH) : uint4{};
#else
        copy_async(to + i * kWarp * kUnitBytes, from + i * kSpan * LENGTH, inside ? kUnitBytes : 0);
#endif
    }
}

// Where a column of x stands in a panel: eight neighbours of eight columns meet in no bank when they are written.
__device__ __forceinline__ Word place_of(Word column) {
    return kOne ? column * kColumnBytes : (column ^ column / kUnit % kUnit) * kColumnBytes;
}

// The right operands for one token: each lane brings the number of its slot, and gets those of eight.
__device__ __forceinline__ void gather_one(Word (&x)[4], const char* panel, char* exchange, Word column) {
    const int lane = threadIdx.x % kWarp;
    __syncwarp();
    reinterpret_cast<SCALAR*>(exchange)[lane / 2 % 4 * 8 + lane / 8 * 2 + lane % 2] = reinterpret_cast<const SCALAR*>(panel)[column];
    __syncwarp();
    const uint4 eight = reinterpret_cast<const uint4*>(exchange)[lane % 4];
    x[0] = eight.x, x[1] = eight.y, x[2] = eight.z, x[3] = eight.w;
}

using Columns = Word[kHalves][4];  // a tile's right operands

__device__ __forceinline__ void gather(Columns& x, const Held& held, char* panel, char* exchange, Word half_bytes, int first_slot,
                                       int first_column, int nothing) {
    const int column = (first_slot + static_cast<int>(threadIdx.x % kWarp)) / KEEP * WINDOW + held.position - first_column;
    const int found = held.position < 0 ? nothing : column;
    if constexpr (kOne) {
        gather_one(x[0], panel, exchange, found);
    } else {
        const Word from = shared_address(panel) + place_of(found);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) load_turned(x[half], from + half * half_bytes);
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Held& held, Word place, const Columns& x) {
    const int lane = threadIdx.x % kWarp;
#if !REGISTERS
    const int slot = lane / 16 * 8 + lane % 8, part = lane / 8 % 2;
    const Word rows = place + (slot * kParts + (part ^ shuffled(slot))) * kUnitBytes;
#endif
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            Word w[4];
#if REGISTERS
            const uint4 upper = held.weights[2 * step], lower = held.weights[2 * step + 1];
            w[0] = transposed(band ? upper.z : upper.x);
            w[1] = transposed(band ? upper.w : upper.y);
            w[2] = transposed(band ? lower.z : lower.x);
            w[3] = transposed(band ? lower.w : lower.y);
#else
            load_turned(w, (rows ^ band * 2 * kUnitBytes) + step * 16 * kParts * kUnitBytes);
#endif
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                mma(sums[band][half], w, x[half][2 * step], x[half][2 * step + 1], kind());
        }
    }
}

// Eight values of a row of x from a column on; `left` of them are inside.
template <bool vectors>
__device__ __forceinline__ uint4 read_eight(const SCALAR* from, int left) {
    if (vectors) return left > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{};
    uint4 eight{};
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
        if (i < left) reinterpret_cast<SCALAR*>(&eight)[i] = from[i];
    return eight;
}

struct Panel {
    const SCALAR* x;  // [m, k]
    int m, k, units;  // of eight columns
    Word half_bytes;

    template <bool vectors>
    __device__ __forceinline__ void read(uint4 (&eight)[kLoaded], int half, int first, int unit) const {
        const int column = first + unit * kUnit, left = unit < units ? k - column : 0;
#pragma unroll
        for (int i = 0; i < kLoaded; ++i) {
            const int token = half * kUnit + i;
            eight[i] = read_eight<vectors>(x + static_cast<long long>(token) * k + column, token < m ? left : 0);
        }
    }

    __device__ __forceinline__ void write(char* panel, const uint4 (&eight)[kLoaded], int half, int unit) const {
        if constexpr (kOne) {
            reinterpret_cast<uint4*>(panel)[unit] = eight[0];
            return;
        }
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            uint4 column{};
#pragma unroll
            for (int token = 0; token < kLoaded; ++token)
                reinterpret_cast<SCALAR*>(&column)[token] = reinterpret_cast<const SCALAR*>(&eight[token])[i];
            *reinterpret_cast<uint4*>(panel + half * half_bytes + place_of(unit * kUnit + i)) = column;
        }
    }

    // Brings columns from `first` on, and a unit of zeros after them. Warps take the halves in turn.
    template <bool vectors>
    __device__ __forceinline__ void fill(char* panel, int first, int from) const {
#pragma unroll 1
        for (int i = from;; i += kThreads) {
            const int half = i / kWarp % kHalves, unit = i / (kWarp * kHalves) * kWarp + i % kWarp;
            if (i / (kWarp * kHalves) * kWarp > units) return;
            if (unit > units) continue;
            uint4 eight[kLoaded];
            read<vectors>(eight, half, first, unit);
            write(panel, eight, half, unit);
        }
    }
};

using Partial = float[TOKENS][ROWS];  // a warp's sums

__device__ __forceinline__ void keep(Partial& partial, const Sums& sums) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kBands * kHalves * 4; ++i) {
        const int band = i / 4 / kHalves, half = i / 4 % kHalves, lower = i / 2 % 2;
        const int token = half * kUnit + lane % 4 * 2 + i % 2;
#if REGISTERS
        const int row = lane / 8 * 8 + band * 4 + lower * 2 + lane / 4 % 2;
#else
        const int row = band * 16 + lower * 8 + lane / 4;
#endif
        if (token < TOKENS) partial[token][row] = sums[band][half][i % 4];
    }
}

// Adds what the warps kept. The last block of a cluster adds what the others have, and stores; `shares` are theirs.
__device__ __forceinline__ void finish(const Partial* partials, Partial* shares, const SCALAR* bias, SCALAR* y, int m, int n,
                                       int first_row) {
    constexpr int most = (TOKENS * ROWS + kThreads - 1) / kThreads;
    const int rank = blockIdx.x % SPLIT;
    float own[most];
#pragma unroll
    for (int j = 0; j < most; ++j) {
        const int i = j * kThreads + threadIdx.x;
        if (i >= m * ROWS) break;
        own[j] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) own[j] += partials[warp][i / ROWS][i % ROWS];
        if (rank < SPLIT - 1) store_at(shared_address(&shares[rank][i / ROWS][i % ROWS]), SPLIT - 1, own[j]);
    }
    if (SPLIT > 1) sync_cluster();
    if (rank < SPLIT - 1) return;
#pragma unroll
    for (int j = 0; j < most; ++j) {
        const int i = j * kThreads + threadIdx.x, token = i / ROWS, row = first_row + i % ROWS;
        if (i >= m * ROWS || row >= n) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int block = 0; block < SPLIT - 1; ++block) sum += shares[block][token][i % ROWS];
        store(y + static_cast<long long>(token) * n + row, sum + own[j]);
    }
}

#if STAMPS
#define STAMP(i) if (threadIdx.x % 32 == 0 && at.strip == static_cast<int>(blockIdx.x) / SPLIT) stamps[(blockIdx.x * WARPS + threadIdx.x / 32) * 8 + i] = clock64()
#else
#define STAMP(i)
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, BLOCKS) semisparse_vector_nm_decode_tensor(
    // x is not __restrict__: loads that the compiler takes for constants could move before the wait for the previous kernel.
    const SCALAR* x,                                // [m, k]
    const SCALAR* __restrict__ values,              // [groups, total, LENGTH]
    const unsigned char* __restrict__ positions,    // [groups, total]
    const SCALAR* bias,                             // [n] or null
    SCALAR* y,                                      // [m, n]
    int m, int n, int k, int total, int strips,
    int panel_tiles,                                // of x that shared memory holds
    int panel_units,                                // of eight columns
    int panels,                                     // that cover x
    int rounds,                                     // that a warp takes for a panel's tiles, a multiple of STAGES
    int vectors,                                    // whether x can be read 16 bytes at a time
    int early                                       // whether the weight may be read before the previous kernel ends
#if STAMPS
    , long long* stamps
#endif
) {
    // The warps' tiles (with REGISTERS none), the panel, the partial sums, for one token the warps' exchanges.
    extern __shared__ __align__(256) unsigned char shared[];
    const Plan plan{values, positions, total, panel_tiles, panels, (total + kSlots - 1) / kSlots, rounds};
    const Panel source{x, m, k, panel_units, static_cast<Word>((panel_units + 1) * kUnit * kColumnBytes)};
    constexpr int ring_bytes = REGISTERS ? 0 : WARPS * STAGES * kTileBytes;
    char* panel = reinterpret_cast<char*>(shared) + ring_bytes;
    Partial* partials = reinterpret_cast<Partial*>(panel + kHalves * source.half_bytes);
    const Word ring = shared_address(shared) + threadIdx.x / kWarp * STAGES * kTileBytes;
    char* exchange = reinterpret_cast<char*>(partials + WARPS) + threadIdx.x / kWarp * kSlots * 2;

    const int first_panel = blockIdx.x % SPLIT;
    Cursor at{static_cast<int>(blockIdx.x) / SPLIT, first_panel, 0}, asked = at;
    Partial* shares = reinterpret_cast<Partial*>(exchange - threadIdx.x / kWarp * kSlots * 2 + (kOne ? WARPS * kSlots * 2 : 0));
    int parity = 0;
    STAMP(0);
    if (!early) wait_for_previous_kernel();
    Held held[STAGES];
#if XFIRST
    uint4 eight[kLoaded];
    if (vectors && !early) source.read<true>(eight, 0, first_panel * panel_tiles * kSlots / KEEP * WINDOW, threadIdx.x);
#endif
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        if (asked.holds(plan, strips)) ask(held[i], ring + i * kTileBytes, plan, asked);
        commit_copies();
        asked.advance(plan);
    }
    STAMP(1);
    if (early) wait_for_previous_kernel();
    let_next_kernel_start();
    bool filled = false;
    while (at.strip < strips) {
        Sums sums = {};
        for (at.panel = first_panel; at.panel < panels; at.panel += SPLIT) {
            const int first_column = at.panel * panel_tiles * kSlots / KEEP * WINDOW;
            if (panels > SPLIT || !filled) {
                if (filled) __syncthreads();
                int from_unit = threadIdx.x;
#if XFIRST
                if (vectors && !early && !filled) {
                    if (from_unit <= panel_units) source.write(panel, eight, 0, from_unit);
                    from_unit += kThreads;
                }
#endif
                if (vectors) source.fill<true>(panel, first_column, from_unit);
                else source.fill<false>(panel, first_column, from_unit);
                __syncthreads();
                filled = true;
            }
            STAMP(2);
#pragma unroll 1
            for (at.round = 0; at.round < rounds; at.round += STAGES) {
#pragma unroll
                for (int i = 0; i < STAGES; ++i) {
                    Cursor now = at;
                    now.round += i;
                    const bool holds = now.holds(plan, strips);
                    Columns columns;
                    if (holds) {
                        gather(columns, held[i], panel, exchange, source.half_bytes, now.tile(plan) * kSlots, first_column,
                               panel_units * kUnit);
                    }
                    if (!REGISTERS) {
                        wait_for_copies<STAGES - 1>();
                        __syncwarp();
                    }
                    if (holds) multiply(sums, held[i], ring + i * kTileBytes, columns);
                    if (i == 0 && at.round == 0) { STAMP(3); }
                    if (!REGISTERS) __syncwarp();
                    if (asked.holds(plan, strips)) ask(held[i], ring + i * kTileBytes, plan, asked);
                    if (!REGISTERS) commit_copies();
                    asked.advance(plan);
                }
            }
        }
        STAMP(4);
        keep(partials[threadIdx.x / kWarp], sums);
        __syncthreads();
        finish(partials, shares + parity * (SPLIT - 1), bias, y, m, n, at.strip * ROWS);
        parity ^= 1;
        STAMP(5);
        at.strip += gridDim.x / SPLIT;
        if (at.strip < strips) __syncthreads();
    }
}
