// The pipeline of the tiled GEMMs (gemm.cu, gemm_fp32.cu): columns of x are copied to shared memory, stage by stage, while
// the CTA multiplies earlier stages.
//
// A CTA computes TILE_M tokens x TILE_N rows of y. A stage is the next STAGE_SLOTS slots of every group of rows in the
// tile. In shared memory it holds the columns of x that these slots multiply: at most STAGE_COLUMNS columns of TILE_M
// tokens.
//
// Macros: SCALAR (of x, w and y), TILE_M, TILE_N, THREADS, LENGTH (rows per vector), STAGE_SLOTS, STAGE_COLUMNS, STAGES
// (buffers; with 1, copying and computing alternate), PACKED (1: a stage holds only columns that some group of the tile
// keeps; 0: all columns of its windows).

#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kChunk = 16 / sizeof(SCALAR);                 // elements per 16-byte copy
constexpr int kPad = sizeof(SCALAR) == 2 ? 2 * kChunk : 0;  // so that four consecutive columns lie in different banks
constexpr int kGroupRows = LENGTH < TILE_N ? LENGTH : TILE_N;  // rows of a group in the tile
constexpr int kGroups = TILE_N / kGroupRows;
constexpr int kColumnPitch = TILE_M + kPad;
constexpr int kColumnBytes = STAGE_COLUMNS * kColumnPitch * sizeof(SCALAR);
constexpr int kChunksPerColumn = TILE_M / kChunk;
constexpr int kColumnsPerPass = THREADS / kChunksPerColumn;  // that all threads copy at once
constexpr int kColumnPasses = (STAGE_COLUMNS + kColumnsPerPass - 1) / kColumnsPerPass;

static_assert(STAGE_SLOTS % 4 == 0 && TILE_M % kChunk == 0 && kGroupRows % kChunk == 0, "whole chunks");
static_assert(THREADS % kChunksPerColumn == 0, "whole columns per pass");

struct Operands {
    const SCALAR* x_t;      // [columns, pitch]: x transposed
    const SCALAR* values;   // [groups, slots, LENGTH]
    const int* columns;     // [row_tiles, stages, STAGE_COLUMNS]
    const int* offsets;     // [row_tiles, stages, kGroups, STAGE_SLOTS], see column_info.cu
    int pitch, groups, slots, stages;

    // Group of the tile's first row.
    __device__ __forceinline__ int first_group() const { return static_cast<int>(blockIdx.y * 1LL * TILE_N / LENGTH); }

    __device__ __forceinline__ const int* tile_offsets() const {
        return offsets + static_cast<long long>(blockIdx.y) * stages * kGroups * STAGE_SLOTS;
    }
};

// A thread's copies of x, stage after stage. What all stages share is computed once: computing addresses at each copy takes
// 220 instructions per stage, beside 1,024 FFMA.
struct ColumnCopier {
    const Operands& from;
    const int chunk = threadIdx.x % kChunksPerColumn;  // of each column that this thread copies
    const int row = threadIdx.x / kChunksPerColumn;    // its first column of the stage
    const char* tokens;                                // its chunk of column 0; if not packed, of the next stage's first column
    const int* columns;                                // packed: its first entry in the column list of the stage after the next
    int next[kColumnPasses];                           // packed: the columns that it copies next

    __device__ __forceinline__ explicit ColumnCopier(const Operands& operands) : from(operands) {
        const long long first_token = static_cast<long long>(blockIdx.x) * TILE_M + chunk * kChunk;
        tokens = reinterpret_cast<const char*>(from.x_t + first_token + (PACKED ? 0LL : row * 1LL * from.pitch));
        columns = from.columns + static_cast<long long>(blockIdx.y) * from.stages * STAGE_COLUMNS + row;
        prefetch_columns();
    }

    // Loads the list of columns one stage before they are copied, so that the copies do not wait for it (section III-C2).
    __device__ __forceinline__ void prefetch_columns() {
        if (!PACKED) return;
#pragma unroll
        for (int pass = 0; pass < kColumnPasses; ++pass) {
            next[pass] = in_stage(pass) ? __ldg(columns + pass * kColumnsPerPass) : -1;
        }
        columns += STAGE_COLUMNS;
    }

    __device__ __forceinline__ bool in_stage(int pass) const {
        return STAGE_COLUMNS % kColumnsPerPass == 0 || pass * kColumnsPerPass + row < STAGE_COLUMNS;
    }

    __device__ __forceinline__ void copy(SCALAR* to) {
        const int bytes = from.pitch * static_cast<int>(sizeof(SCALAR));
        to += row * kColumnPitch + chunk * kChunk;
        const char* column = tokens;
#pragma unroll
        for (int pass = 0; pass < kColumnPasses; ++pass) {
            if (PACKED) column = tokens + static_cast<long long>(next[pass]) * bytes;
            // Past the list's end the copy writes zeros: a branch takes more instructions (1,353 per stage, not 1,256).
            const int source_bytes = !PACKED || next[pass] >= 0 ? 16 : 0;
            if (in_stage(pass)) cp_async_16(smem_address(to + pass * kColumnsPerPass * kColumnPitch), column, source_bytes);
            if (!PACKED) column += kColumnsPerPass * static_cast<long long>(bytes);
        }
        if (!PACKED) tokens += STAGE_COLUMNS * static_cast<long long>(bytes);
    }
};

// Runs the main loop. `copy(buffer, last)` issues the copies of the next stage, `compute(buffer)` multiplies one that has
// arrived.
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
    for (int stage = 0; stage < stages; ++stage) {
        cp_async_wait_group<in_flight - 1>();
        __syncthreads();  // All threads' copies have arrived, and nobody reads the buffer that is filled next.
        if (STAGES > 1) copy_next();
        compute(shared + reading);
        if (STAGES == 1) {
            __syncthreads();
            copy_next();
        }
        reading = reading == (STAGES - 1) * bytes ? 0 : reading + bytes;
    }
}
