// How a block of the float32 product brings its weights to shared memory beside the columns of x that staging.cuh brings.

#pragma once

#include "staging.cuh"

constexpr int kValuePitch = kSpan;
// Single floats of groups of 4 to 16 rows are read side by side: a slot's length between groups keeps them apart.
constexpr int kGroupPitch = SLOTS * kValuePitch + (kSpan < 32 ? kValuePitch : 0);
constexpr int kValueBytes = kGroups * kGroupPitch * sizeof(SCALAR);
constexpr int kOffsetBytes = kGroups * SLOTS * 4;
constexpr int kStageBytes = kColumnBytes + kValueBytes + kOffsetBytes;
constexpr int kUnitsOfSlot = kSpan / kUnit;
constexpr int kValueUnits = kGroups * SLOTS * kUnitsOfSlot;
// Whether a thread's units stand at the same place of their groups, or slots, at each turn.
constexpr bool kEven = SLOTS * kUnitsOfSlot % THREADS == 0 || THREADS % (SLOTS * kUnitsOfSlot) == 0;
constexpr int kValueTurns = (kValueUnits + THREADS - 1) / THREADS;

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

// A thread's share of the copies of values and offsets, stage after stage.
struct ValueStager {
    const Operands& from;
    const int* offsets;                   // of the next stage
    const SCALAR* values;                 // of the next stage, in the block's first group
    int left;                             // slots that are still to be copied
    int sources[kValueTurns];             // its units of the values, from `values`
    int places[kEven ? 1 : kValueTurns];  // and in shared memory

    __device__ __forceinline__ explicit ValueStager(const Operands& operands) : from(operands), left(operands.total) {
        const long long first_row = static_cast<long long>(blockIdx.y) * ROWS;
        offsets = from.slots_of_block() + threadIdx.x * 4;
        values = from.values + static_cast<long long>(from.first_group()) * from.total * LENGTH + first_row % LENGTH;
#pragma unroll
        for (int turn = 0; turn < kValueTurns; ++turn) {
            const ValueUnit mine(threadIdx.x + turn * THREADS);
            sources[turn] = (group(mine) * from.total + mine.slot) * LENGTH + mine.element;
            if (!kEven || turn == 0) places[kEven ? 0 : turn] = mine.place();
        }
    }

    // Past the last group its values are read again: those rows are not stored.
    __device__ __forceinline__ int group(const ValueUnit& mine) const {
        return min(mine.group, from.groups - 1 - from.first_group());
    }

    __device__ __forceinline__ void copy(const Stage& to) {
        copy_values(to.values());
#pragma unroll
        for (int i = 0; i < kGroups * SLOTS; i += 4 * THREADS) {
            if (i + threadIdx.x * 4 < kGroups * SLOTS) {
                cp_async_16(smem_address(to.offsets() + i + threadIdx.x * 4), offsets + i);
            }
        }
        offsets += kGroups * SLOTS;
        values += SLOTS * LENGTH;
        left -= SLOTS;
    }

    __device__ __forceinline__ void copy_values(SCALAR* to) const {
        if (left >= SLOTS) {
#pragma unroll
            for (int turn = 0; turn < kValueTurns; ++turn) {
                if (kValueUnits % THREADS && threadIdx.x + turn * THREADS >= kValueUnits) continue;
                const int place = kEven ? places[0] + ValueUnit(turn * THREADS).place() : places[kEven ? 0 : turn];
                cp_async_16(smem_address(to + place), values + sources[turn]);
            }
            return;
        }
        // The last stage: zeros past the last slot.
#pragma unroll 1
        for (int i = threadIdx.x; i < kValueUnits; i += THREADS) {
            const ValueUnit mine(i);
            const bool wanted = mine.slot < left;
            const SCALAR* source = values + (group(mine) * from.total + (wanted ? mine.slot : 0)) * LENGTH + mine.element;
            cp_async_16(smem_address(to + mine.place()), source, wanted ? 16 : 0);
        }
    }
};
