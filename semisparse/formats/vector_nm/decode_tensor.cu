// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for few tokens on tensor cores, straight from the packed bytes.
//
// A strip is ROWS rows of a group, a tile 32 slots of it. A block takes strips in turn; its warps share out a strip's tiles, and
// each has STAGES of them on their way. A tile is the left operand of products of 16 rows and 16 slots, turned on its way to
// registers, because a slot's rows lie side by side. The right one are the slots' columns of x for eight tokens: panels of x lie in
// shared memory, the tokens of a column side by side, so that one load of matrices gathers 32 columns by their addresses. Sums
// are float32 and added in a fixed order: every run gives the same bits.
//
// A launch may begin before the kernel before it has ended. Up to `griddepcontrol_wait` nothing is read but, where that is
// asked for, the weight.
//
// Compiled for SCALAR (half or bfloat16, of x, w, bias and y), KEEP, WINDOW, LENGTH, ROWS (16 or 32), TOKENS (1, 8 or 16), WARPS,
// STAGES, BLOCKS (of a processor, for registers).

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "types.cuh"

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
constexpr bool kFirst = TOKENS <= 8;             // x is read before the weight: 7.46 for 7.96 us at 4096 x 4096, M = 1

using Sums = float[kBands][kHalves][4];

__device__ __forceinline__ const SCALAR* kind() { return nullptr; }

// Which slots, of which strip, are where: a turn is a strip's share of a panel.
struct Plan {
    const SCALAR* values;            // [groups, total, LENGTH]
    const unsigned char* positions;  // [groups, total]
    int total, strips, panel_tiles, panels, tiles, rounds;
};

// Where a warp is: its tiles of a turn one after another, then those of the block's next turn. Every other strip passes over the
// panels from the last to the first, and so begins with the one that is there.
struct Cursor {
    int strip, turn, round;
    bool back;

    __device__ __forceinline__ int panel(const Plan& plan) const { return back ? plan.panels - 1 - turn : turn; }
    __device__ __forceinline__ int tile(const Plan& plan) const {
        return panel(plan) * plan.panel_tiles + round * WARPS + static_cast<int>(threadIdx.x) / kWarp;
    }
    __device__ __forceinline__ int first_column(const Plan& plan) const {
        return panel(plan) * plan.panel_tiles * kSlots / KEEP * WINDOW;
    }
    __device__ __forceinline__ bool holds(const Plan& plan) const {
        return strip < plan.strips && tile(plan) < min((panel(plan) + 1) * plan.panel_tiles, plan.tiles);
    }
    __device__ __forceinline__ void next_strip() {
        turn = 0;
        back = !back;
        strip += gridDim.x;
    }
    __device__ __forceinline__ void advance(const Plan& plan) {
        if (++round < plan.rounds) return;
        round = 0;
        if (++turn == plan.panels) next_strip();
    }
};

// Units of eight slots and the same rows stand in banks of their own.
__device__ __forceinline__ int shuffled(int slot) { return slot / (kUnit / kParts) % kParts; }

// Asks for a tile. Gives the position of the lane's slot in its window, -1 past the last slot.
__device__ __forceinline__ int ask(Word place, const Plan& plan, const Cursor& at) {
    const int lane = threadIdx.x % kWarp, first = at.tile(plan) * kSlots, left = plan.total - first;
    const long long start = static_cast<long long>(at.strip / kStrips) * plan.total + first;
    const int position = lane < left ? plan.positions[start + lane] : -1;
    const SCALAR* from = plan.values + (start + lane / kParts) * LENGTH + at.strip % kStrips * ROWS + lane % kParts * kUnit;
    const Word to = place + (lane / kParts * kParts + (lane % kParts ^ shuffled(lane / kParts))) * kUnitBytes;
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) {
        const bool inside = lane / kParts + i * kSpan < left;
        cp_async_16(to + i * kWarp * kUnitBytes, from + i * kSpan * LENGTH, inside ? kUnitBytes : 0);
    }
    return position;
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

__device__ __forceinline__ void gather(Columns& x, int position, char* panel, char* exchange, Word half_bytes, int first_slot,
                                       int first_column) {
    const int column = (first_slot + static_cast<int>(threadIdx.x % kWarp)) / KEEP * WINDOW + position - first_column;
    const int found = position < 0 ? 0 : column;  // its weights are zeros
    if constexpr (kOne) {
        gather_one(x[0], panel, exchange, found);
    } else {
        const Word from = smem_address(panel) + place_of(found);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) ldmatrix_x4_trans(x[half], from + half * half_bytes);
    }
}

__device__ __forceinline__ void multiply(Sums& sums, Word place, const Columns& x) {
    const int lane = threadIdx.x % kWarp;
    const int slot = lane / 16 * 8 + lane % 8, part = lane / 8 % 2;
    const Word rows = place + (slot * kParts + (part ^ shuffled(slot))) * kUnitBytes;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            Word w[4];
            ldmatrix_x4_trans(w, (rows ^ band * 2 * kUnitBytes) + step * 16 * kParts * kUnitBytes);
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                mma_m16n8k16(sums[band][half], w, x[half][2 * step], x[half][2 * step + 1], kind());
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
        const int column = first + unit * kUnit, left = k - column;
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

    // What a thread brings at a time is an item: warps take the halves in turn.
    static __device__ __forceinline__ int half_of(int item) { return item / kWarp % kHalves; }
    static __device__ __forceinline__ int unit_of(int item) { return item / (kWarp * kHalves) * kWarp + item % kWarp; }

    // Brings columns from `first` on, those past column k and token m as zeros, beginning with an item.
    template <bool vectors>
    __device__ __forceinline__ void fill(char* panel, int first, int item) const {
        const int items = (units + kWarp - 1) / kWarp * kWarp * kHalves;
#pragma unroll 1
        for (; item < items; item += kThreads) {
            if (unit_of(item) >= units) continue;
            uint4 eight[kLoaded];
            read<vectors>(eight, half_of(item), first, unit_of(item));
            write(panel, eight, half_of(item), unit_of(item));
        }
    }
};

// A warp's tiles on their way.
struct Ring {
    Word places;  // in shared memory
    Cursor asked;
    int positions[STAGES];

    __device__ __forceinline__ Word place(int stage) const { return places + stage * kTileBytes; }

    __device__ __forceinline__ void refill(int stage, const Plan& plan) {
        if (asked.holds(plan)) positions[stage] = ask(place(stage), plan, asked);
        cp_async_commit_group();
        asked.advance(plan);
    }
};

// Adds a warp's tiles of a panel of x.
__device__ __forceinline__ void add_panel(Sums& sums, Ring& ring, Cursor at, const Plan& plan, char* panel, char* exchange,
                                          Word half_bytes) {
    const int first_column = at.first_column(plan);
#pragma unroll 1
    for (int round = 0; round < plan.rounds; round += STAGES) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            at.round = round + i;
            const bool holds = at.holds(plan);
            Columns columns;
            if (holds) gather(columns, ring.positions[i], panel, exchange, half_bytes, at.tile(plan) * kSlots, first_column);
            cp_async_wait_group<STAGES - 1>();
            __syncwarp();
            if (holds) multiply(sums, ring.place(i), columns);
            __syncwarp();
            ring.refill(i, plan);
        }
    }
}

using Partial = float[TOKENS][ROWS];  // a warp's sums

__device__ __forceinline__ void keep(Partial& partial, const Sums& sums) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kBands * kHalves * 4; ++i) {
        const int band = i / 4 / kHalves, half = i / 4 % kHalves, lower = i / 2 % 2;
        const int token = half * kUnit + lane % 4 * 2 + i % 2;
        const int row = band * 16 + lower * 8 + lane / 4;
        if (token < TOKENS) partial[token][row] = sums[band][half][i % 4];
    }
}

// Adds what the warps kept, and stores.
__device__ __forceinline__ void finish(const Partial* partials, const SCALAR* bias, SCALAR* y, int m, int n, int first_row) {
    for (int i = threadIdx.x; i < m * ROWS; i += kThreads) {
        const int token = i / ROWS, row = first_row + i % ROWS;
        if (row >= n) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += partials[warp][token][i % ROWS];
        store(y + static_cast<long long>(token) * n + row, sum);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_vector_nm_decode_tensor(
    // Not __restrict__: loads that the compiler takes for constants could move before the wait for the previous kernel.
    const SCALAR* x,                 // [m, k]
    const SCALAR* values,            // [groups, total, LENGTH]
    const unsigned char* positions,  // [groups, total]
    const SCALAR* bias,              // [n] or null
    SCALAR* y,                       // [m, n]
    int m, int n, int k, int total, int strips,
    int panel_tiles,                 // of x that shared memory holds
    int panel_units,                 // of eight columns
    int panels,                      // that cover x
    int rounds,                      // that a warp takes for a panel's tiles, a multiple of STAGES
    int vectors,                     // whether x can be read 16 bytes at a time
    int early                        // whether the weight may be read before the previous kernel ends
) {
    // The warps' tiles, the panel, the partial sums, for one token the warps' exchanges.
    extern __shared__ __align__(256) unsigned char shared[];
    const Plan plan{values, positions, total, strips, panel_tiles, panels, (total + kSlots - 1) / kSlots, rounds};
    const Panel source{x, m, k, panel_units, static_cast<Word>(panel_units * kUnit * kColumnBytes)};
    const int warp = threadIdx.x / kWarp;
    char* panel = reinterpret_cast<char*>(shared) + WARPS * STAGES * kTileBytes;
    Partial* partials = reinterpret_cast<Partial*>(panel + kHalves * source.half_bytes);
    char* exchange = reinterpret_cast<char*>(partials + WARPS) + warp * kSlots * 2;

    Cursor at{static_cast<int>(blockIdx.x), 0, 0, false};
    Ring ring{smem_address(shared) + warp * STAGES * kTileBytes, at};
    if (!early) griddepcontrol_wait();
    int item = threadIdx.x;
    uint4 eight[kLoaded];
    const bool first = kFirst && vectors && !early && Panel::unit_of(item) < panel_units;
    if (first) source.read<true>(eight, Panel::half_of(item), 0, Panel::unit_of(item));
#pragma unroll
    for (int i = 0; i < STAGES; ++i) ring.refill(i, plan);
    if (early) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (first) {
        source.write(panel, eight, Panel::half_of(item), Panel::unit_of(item));
        item += kThreads;
    }
    for (int loaded = -1; at.strip < strips; at.next_strip()) {
        Sums sums = {};
        for (at.turn = 0; at.turn < panels; ++at.turn) {
            if (at.panel(plan) != loaded) {
                if (loaded >= 0) __syncthreads();
                loaded = at.panel(plan);
                if (vectors) source.fill<true>(panel, at.first_column(plan), item);
                else source.fill<false>(panel, at.first_column(plan), item);
                item = threadIdx.x;
                __syncthreads();
            }
            add_panel(sums, ring, at, plan, panel, exchange, source.half_bytes);
        }
        keep(partials[warp], sums);
        __syncthreads();
        finish(partials, bias, y, m, n, at.strip * ROWS);
        __syncthreads();
    }
}
