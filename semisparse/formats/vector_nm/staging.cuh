// How a block of a product brings its operands to shared memory, stage by stage, while it computes on those before.
//
// A block computes TOKENS x ROWS of y. A stage is SLOTS slots of every group of rows in it: the values, the columns of x that
// they take (COLUMNS rows of TOKENS, at most), and for each group and slot the place of its column among these.
//
// Compiled for SCALAR (of x and w), TOKENS, ROWS, THREADS, LENGTH (rows of a vector), SLOTS, COLUMNS, STAGES (buffers; 1
// computes and copies in turn), PACKED (1: only columns that some group keeps; 0: all columns of the windows).

#pragma once

#include "primitives.cuh"

constexpr int kWarp = 32;
constexpr int kUnit = 16 / sizeof(SCALAR);                 // elements in a copy
constexpr int kPad = sizeof(SCALAR) == 2 ? kUnit : 0;      // keeps matrix loads off each other's banks
constexpr int kSpan = LENGTH < ROWS ? LENGTH : ROWS;       // rows of a group in this block
constexpr int kGroups = ROWS / kSpan;
constexpr int kColumnPitch = TOKENS + kPad;
constexpr int kValuePitch = kSpan + kPad;
// Single floats of groups of 4 to 16 rows are read side by side: a slot's length between groups keeps them apart.
constexpr int kGroupPitch = SLOTS * kValuePitch + (kSpan < 32 ? kValuePitch : 0);
constexpr int kColumnBytes = COLUMNS * kColumnPitch * sizeof(SCALAR);
constexpr int kValueBytes = kGroups * kGroupPitch * sizeof(SCALAR);
constexpr int kOffsetBytes = kGroups * SLOTS * 4;
constexpr int kStageBytes = kColumnBytes + kValueBytes + kOffsetBytes;
constexpr int kUnitsOfColumn = TOKENS / kUnit;
constexpr int kColumnsAtOnce = THREADS / kUnitsOfColumn;
constexpr int kColumnTurns = (COLUMNS + kColumnsAtOnce - 1) / kColumnsAtOnce;
constexpr int kUnitsOfSlot = kSpan / kUnit;
constexpr int kValueUnits = kGroups * SLOTS * kUnitsOfSlot;
// Whether a thread's units stand at the same place of their groups, or slots, at each turn.
constexpr bool kEven = SLOTS * kUnitsOfSlot % THREADS == 0 || THREADS % (SLOTS * kUnitsOfSlot) == 0;
constexpr int kValueTurns = (kValueUnits + THREADS - 1) / THREADS;

static_assert(SLOTS % 4 == 0 && TOKENS % kUnit == 0 && THREADS % kUnitsOfColumn == 0 && kSpan % kUnit == 0, "tile");

struct Operands {
    const SCALAR* by_column;  // [columns, pitch]
    const SCALAR* values;     // [groups, total, LENGTH]
    const int* columns;       // [row_blocks, stages, COLUMNS]
    const int* offsets;       // [row_blocks, stages, kGroups, SLOTS]
    int pitch, groups, total, stages;
};

// One buffer of shared memory.
struct Stage {
    char* base;

    __device__ __forceinline__ SCALAR* columns() const { return reinterpret_cast<SCALAR*>(base); }
    __device__ __forceinline__ SCALAR* values() const { return reinterpret_cast<SCALAR*>(base + kColumnBytes); }
    __device__ __forceinline__ int* offsets() const { return reinterpret_cast<int*>(base + kColumnBytes + kValueBytes); }
};

// One 16-byte unit of a stage's values, number `index`: group by group, slot by slot.
struct ValueUnit {
    int group, slot, element;

    __device__ __forceinline__ explicit ValueUnit(int index)
        : group(index / (SLOTS * kUnitsOfSlot)), slot(index / kUnitsOfSlot % SLOTS), element(index % kUnitsOfSlot * kUnit) {}

    // Where it stands in shared memory.
    __device__ __forceinline__ int place() const { return group * kGroupPitch + slot * kValuePitch + element; }
};

// A thread's share of the copies, stage after stage. What does not change from stage to stage is computed once: addresses
// anew at each copy cost 220 instructions a stage, beside 1,024 of multiplying.
struct Stager {
    const Operands& from;
    const int unit = threadIdx.x % kUnitsOfColumn;  // of each column that it copies
    const int row = threadIdx.x / kUnitsOfColumn;   // the first such column in the stage
    const char* tokens;                             // its unit of column 0; of the next stage's first, if not packed
    const int* columns;                             // packed: its first entry of the list for the stage after the next
    const int* offsets;                             // of the next stage
    const SCALAR* values;                           // of the next stage, in the block's first group
    int sources[kValueTurns];                       // its units of the values, from `values`
    int places[kEven ? 1 : kValueTurns];            // and in shared memory
    int ahead[kColumnTurns];                        // packed: the columns that it copies next
    int next = 0;                                   // the stage to be copied
    char* const buffers;
    int filling = 0;                                // bytes from `buffers` to the one that is filled next

    __device__ __forceinline__ Stager(const Operands& operands, char* shared) : from(operands), buffers(shared) {
        const long long first_row = static_cast<long long>(blockIdx.y) * ROWS;
        const long long first_stage = static_cast<long long>(blockIdx.y) * from.stages;
        const long long first_token = static_cast<long long>(blockIdx.x) * TOKENS + unit * kUnit;
        tokens = reinterpret_cast<const char*>(from.by_column + first_token + (PACKED ? 0LL : row * 1LL * from.pitch));
        columns = from.columns + first_stage * COLUMNS + row;
        offsets = from.offsets + first_stage * kGroups * SLOTS + threadIdx.x * 4;
        const int first_group = static_cast<int>(first_row / LENGTH);
        values = from.values + static_cast<long long>(first_group) * from.total * LENGTH + first_row % LENGTH;
#pragma unroll
        for (int turn = 0; turn < kValueTurns; ++turn) {
            const ValueUnit mine(threadIdx.x + turn * THREADS);
            // Past the last group its values are read again: those rows are not stored.
            const int group = min(mine.group, from.groups - 1 - first_group);
            sources[turn] = (group * from.total + mine.slot) * LENGTH + mine.element;
            if (!kEven || turn == 0) places[kEven ? 0 : turn] = mine.place();
        }
        look_ahead();
    }

    // Reads the list of columns one stage before they are copied: the copies then wait for nothing.
    __device__ __forceinline__ void look_ahead() {
        if (!PACKED) return;
#pragma unroll
        for (int turn = 0; turn < kColumnTurns; ++turn) {
            ahead[turn] = is_mine(turn) ? __ldg(columns + turn * kColumnsAtOnce) : -1;
        }
        columns += COLUMNS;
    }

    __device__ __forceinline__ bool is_mine(int turn) const {
        return COLUMNS % kColumnsAtOnce == 0 || turn * kColumnsAtOnce + row < COLUMNS;
    }

    __device__ __forceinline__ void copy_columns(SCALAR* to) {
        const int bytes = from.pitch * static_cast<int>(sizeof(SCALAR));
        to += row * kColumnPitch + unit * kUnit;
        const char* column = tokens;
#pragma unroll
        for (int turn = 0; turn < kColumnTurns; ++turn) {
            if (PACKED) column = tokens + static_cast<long long>(ahead[turn]) * bytes;
            // Past the list's end nothing is read: a branch would cost more than the copy of zeros.
            if (is_mine(turn)) copy_async(to + turn * kColumnsAtOnce * kColumnPitch, column, !PACKED || ahead[turn] >= 0);
            if (!PACKED) column += kColumnsAtOnce * static_cast<long long>(bytes);
        }
        if (!PACKED) tokens += COLUMNS * static_cast<long long>(bytes);
    }

    __device__ __forceinline__ void copy_values(SCALAR* to) const {
        const int left = from.total - next * SLOTS;
        if (left >= SLOTS) {
#pragma unroll
            for (int turn = 0; turn < kValueTurns; ++turn) {
                if (kValueUnits % THREADS && threadIdx.x + turn * THREADS >= kValueUnits) continue;
                const int place = kEven ? places[0] + ValueUnit(turn * THREADS).place() : places[kEven ? 0 : turn];
                copy_async(to + place, values + sources[turn], true);
            }
            return;
        }
        // The last stage: zeros past the last slot.
#pragma unroll 1
        for (int i = threadIdx.x; i < kValueUnits; i += THREADS) {
            const ValueUnit mine(i);
            const int group = min(mine.group, from.groups - 1 - static_cast<int>(blockIdx.y * 1LL * ROWS / LENGTH));
            const bool wanted = mine.slot < left;
            const SCALAR* source = values + (group * from.total + (wanted ? mine.slot : 0)) * LENGTH + mine.element;
            copy_async(to + mine.place(), source, wanted);
        }
    }

    __device__ __forceinline__ void copy_offsets(int* to) const {
#pragma unroll
        for (int i = 0; i < kGroups * SLOTS; i += 4 * THREADS) {
            if (i + threadIdx.x * 4 < kGroups * SLOTS) copy_async(to + i + threadIdx.x * 4, offsets + i, true);
        }
    }

    // Starts to copy the next stage, if there is one.
    __device__ __forceinline__ void copy_next() {
        if (next < from.stages) {
            const Stage to{buffers + filling};
            copy_columns(to.columns());
            copy_values(to.values());
            copy_offsets(to.offsets());
            offsets += kGroups * SLOTS;
            values += SLOTS * LENGTH;
            filling = filling == (STAGES - 1) * kStageBytes ? 0 : filling + kStageBytes;
            if (++next < from.stages) look_ahead();
        }
        commit_copies();
    }
};

// Walks over all stages; `compute` gets each in shared memory.
template <typename Compute>
__device__ __forceinline__ void for_each_stage(Stager& stager, Compute compute) {
    constexpr int in_flight = STAGES > 1 ? STAGES - 1 : 1;
    int reading = 0;
#pragma unroll
    for (int i = 0; i < in_flight; ++i) stager.copy_next();
#pragma unroll 1
    for (int index = 0; index < stager.from.stages; ++index) {
        wait_for_copies<in_flight - 1>();
        __syncthreads();  // Every thread's copies have come, and the buffer computed on before is free.
        if (STAGES > 1) stager.copy_next();
        compute(Stage{stager.buffers + reading});
        if (STAGES == 1) {
            __syncthreads();
            stager.copy_next();
        }
        reading = reading == (STAGES - 1) * kStageBytes ? 0 : reading + kStageBytes;
    }
}
