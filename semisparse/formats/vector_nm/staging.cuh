// How a block of a product brings columns of x, and float32 values, to shared memory, stage by stage, while it computes on those
// before.
//
// A block computes TOKENS x ROWS of y. A stage is SLOTS slots of every group of rows in it: the columns of x that they take
// (COLUMNS rows of TOKENS, at most), and what the product wants beside them.
//
// Compiled for SCALAR (of x and w), TOKENS, ROWS, THREADS, LENGTH (rows of a vector), SLOTS, COLUMNS, STAGES (buffers; 1
// computes and copies in turn), PACKED (1: only columns that some group keeps; 0: all columns of the windows).

#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kUnit = 16 / sizeof(SCALAR);                 // elements in a copy
constexpr int kPad = sizeof(SCALAR) == 2 ? 2 * kUnit : 0;  // four consecutive columns then lie in banks of their own
constexpr int kSpan = LENGTH < ROWS ? LENGTH : ROWS;       // rows of a group in this block
constexpr int kGroups = ROWS / kSpan;
constexpr int kColumnPitch = TOKENS + kPad;
constexpr int kColumnBytes = COLUMNS * kColumnPitch * sizeof(SCALAR);
constexpr int kUnitsOfColumn = TOKENS / kUnit;
constexpr int kColumnsAtOnce = THREADS / kUnitsOfColumn;
constexpr int kColumnTurns = (COLUMNS + kColumnsAtOnce - 1) / kColumnsAtOnce;

static_assert(SLOTS % 4 == 0 && TOKENS % kUnit == 0 && THREADS % kUnitsOfColumn == 0 && kSpan % kUnit == 0, "tile");

struct Operands {
    const SCALAR* by_column;  // [columns, pitch]
    const SCALAR* values;     // [groups, total, LENGTH]
    const int* columns;       // [row_blocks, stages, COLUMNS]
    const int* slots;         // [row_blocks, stages, kGroups, SLOTS], as prepare.cu describes each
    int pitch, groups, total, stages;

    // Group of the block's first row.
    __device__ __forceinline__ int first_group() const { return static_cast<int>(blockIdx.y * 1LL * ROWS / LENGTH); }

    __device__ __forceinline__ const int* slots_of_block() const {
        return slots + static_cast<long long>(blockIdx.y) * stages * kGroups * SLOTS;
    }
};

// A thread's share of the copies of x, stage after stage. What does not change from stage to stage is computed once: addresses
// anew at each copy cost 220 instructions a stage, beside 1,024 of multiplying.
struct ColumnStager {
    const Operands& from;
    const int unit = threadIdx.x % kUnitsOfColumn;  // of each column that it copies
    const int row = threadIdx.x / kUnitsOfColumn;   // the first such column in the stage
    const char* tokens;                             // its unit of column 0; of the next stage's first, if not packed
    const int* columns;                             // packed: its first entry of the list for the stage after the next
    int ahead[kColumnTurns];                        // packed: the columns that it copies next

    __device__ __forceinline__ explicit ColumnStager(const Operands& operands) : from(operands) {
        const long long first_token = static_cast<long long>(blockIdx.x) * TOKENS + unit * kUnit;
        tokens = reinterpret_cast<const char*>(from.by_column + first_token + (PACKED ? 0LL : row * 1LL * from.pitch));
        columns = from.columns + static_cast<long long>(blockIdx.y) * from.stages * COLUMNS + row;
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

    __device__ __forceinline__ void copy(SCALAR* to) {
        const int bytes = from.pitch * static_cast<int>(sizeof(SCALAR));
        to += row * kColumnPitch + unit * kUnit;
        const char* column = tokens;
#pragma unroll
        for (int turn = 0; turn < kColumnTurns; ++turn) {
            if (PACKED) column = tokens + static_cast<long long>(ahead[turn]) * bytes;
            // Past the list's end nothing is read: a branch would cost more than the copy of zeros.
            const int wanted = !PACKED || ahead[turn] >= 0 ? 16 : 0;
            if (is_mine(turn)) cp_async_16(smem_address(to + turn * kColumnsAtOnce * kColumnPitch), column, wanted);
            if (!PACKED) column += kColumnsAtOnce * static_cast<long long>(bytes);
        }
        if (!PACKED) tokens += COLUMNS * static_cast<long long>(bytes);
    }
};

// Walks over all stages. `copy(buffer, last)` starts to copy the next one, `compute(buffer)` gets each in shared memory.
template <int bytes, typename Copy, typename Compute>
__device__ __forceinline__ void for_each_stage(int stages, char* shared, Copy copy, Compute compute) {
    constexpr int in_flight = STAGES > 1 ? STAGES - 1 : 1;
    int next = 0, filling = 0, reading = 0;
    auto copy_next = [&] {
        if (next < stages) {
            copy(shared + filling, next == stages - 1);
            filling = filling == (STAGES - 1) * bytes ? 0 : filling + bytes;
            ++next;
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (int i = 0; i < in_flight; ++i) copy_next();
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
        cp_async_wait_group<in_flight - 1>();
        __syncthreads();  // Every thread's copies have come, and the buffer computed on before is free.
        if (STAGES > 1) copy_next();
        compute(shared + reading);
        if (STAGES == 1) {
            __syncthreads();
            copy_next();
        }
        reading = reading == (STAGES - 1) * bytes ? 0 : reading + bytes;
    }
}
