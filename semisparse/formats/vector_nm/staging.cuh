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

// A thread's share of the copies.
struct Stager {
    const Operands& from;
    char* shared;
    const SCALAR* tokens;      // of this block, at this thread's unit
    int ahead[kColumnTurns];   // packed: the columns that it copies for the next stage

    __device__ __forceinline__ Stager(const Operands& operands, char* buffers) : from(operands), shared(buffers) {
        tokens = from.by_column + static_cast<long long>(blockIdx.x) * TOKENS + threadIdx.x % kUnitsOfColumn * kUnit;
        look_ahead(0);
    }

    __device__ __forceinline__ Stage stage(int index) const { return Stage{shared + index % STAGES * kStageBytes}; }

    __device__ __forceinline__ long long table(int index) const {
        return static_cast<long long>(blockIdx.y) * from.stages + index;
    }

    // Reads the list of the columns one stage before they are copied: the copies then wait for nothing.
    __device__ __forceinline__ void look_ahead(int index) {
        if (!PACKED || index >= from.stages) return;
        const int* columns = from.columns + table(index) * COLUMNS;
#pragma unroll
        for (int turn = 0; turn < kColumnTurns; ++turn) {
            const int row = turn * kColumnsAtOnce + threadIdx.x / kUnitsOfColumn;
            ahead[turn] = row < COLUMNS ? __ldg(columns + row) : -1;
        }
    }

    __device__ __forceinline__ void copy_columns(int index, SCALAR* to) {
#pragma unroll
        for (int turn = 0; turn < kColumnTurns; ++turn) {
            const int row = turn * kColumnsAtOnce + threadIdx.x / kUnitsOfColumn;
            const int column = PACKED ? ahead[turn] : index * COLUMNS + row;
            if (PACKED ? column < 0 : row >= COLUMNS) continue;
            SCALAR* place = to + row * kColumnPitch + threadIdx.x % kUnitsOfColumn * kUnit;
            copy_async(place, tokens + static_cast<long long>(column) * from.pitch, true);
        }
    }

    __device__ __forceinline__ void copy_values(int index, SCALAR* to) const {
        constexpr int units = kSpan / kUnit;
        const long long first_row = static_cast<long long>(blockIdx.y) * ROWS;
#pragma unroll
        for (int i = threadIdx.x; i < kGroups * SLOTS * units; i += THREADS) {
            const int group = i / (SLOTS * units);
            const int slot = i / units % SLOTS;
            const int at = index * SLOTS + slot;
            // Past the last group its values are read again: those rows are not stored.
            const long long source = min(first_row / LENGTH + group, from.groups - 1LL) * from.total + min(at, from.total - 1);
            const SCALAR* place = from.values + source * LENGTH + first_row % LENGTH + i % units * kUnit;
            copy_async(to + group * kGroupPitch + slot * kValuePitch + i % units * kUnit, place, at < from.total);
        }
    }

    __device__ __forceinline__ void copy_offsets(int index, int* to) const {
        const int* offsets = from.offsets + table(index) * kGroups * SLOTS;
        for (int i = threadIdx.x; i < kGroups * SLOTS / 4; i += THREADS) copy_async(to + i * 4, offsets + i * 4, true);
    }

    __device__ __forceinline__ void copy(int index) {
        if (index < from.stages) {
            const Stage to = stage(index);
            copy_columns(index, to.columns());
            copy_values(index, to.values());
            copy_offsets(index, to.offsets());
            look_ahead(index + 1);
        }
        commit_copies();
    }
};

// Walks over all stages; `compute` gets each in shared memory.
template <typename Compute>
__device__ __forceinline__ void for_each_stage(Stager& stager, Compute compute) {
    if constexpr (STAGES == 1) {
        for (int index = 0; index < stager.from.stages; ++index) {
            stager.copy(index);
            wait_for_copies<0>();
            __syncthreads();
            compute(stager.stage(index));
            __syncthreads();
        }
    } else {
#pragma unroll
        for (int index = 0; index < STAGES - 1; ++index) stager.copy(index);
        for (int index = 0; index < stager.from.stages; ++index) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // Every thread's copies have come, and the buffer before this one is free.
            stager.copy(index + STAGES - 1);
            compute(stager.stage(index));
        }
    }
}
