// The pipeline of the tiled GEMMs (gemm.cu, gemm_fp32.cu): columns of x are copied to shared memory, stage by stage, while
// the CTA multiplies earlier stages.
//
// A CTA computes a tile of y for TILE_M tokens and TILE_N rows of w. A slot is one kept vector of a group of rows. A stage
// is the next STAGE_SLOTS slots of every group in the tile; STAGES of them are buffered. The buffer of a stage holds up to
// STAGE_COLUMNS columns of x for TILE_M tokens: those that the slots use (PACKED), or all columns of their windows.
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
constexpr int kPad = sizeof(SCALAR) == 2 ? 2 * kChunk : 0;  // consecutive 16-bit columns begin in other banks
constexpr int kGroupRows = LENGTH < TILE_N ? LENGTH : TILE_N;  // rows of a group in the tile
constexpr int kGroups = TILE_N / kGroupRows;
constexpr int kColumnPitch = TILE_M + kPad;
constexpr int kColumnBytes = STAGE_COLUMNS * kColumnPitch * sizeof(SCALAR);
constexpr int kChunksPerColumn = TILE_M / kChunk;
constexpr int kColumnsPerPass = THREADS / kChunksPerColumn;  // columns of one cp.async per thread
constexpr int kColumnPasses = (STAGE_COLUMNS + kColumnsPerPass - 1) / kColumnsPerPass;

static_assert(STAGE_SLOTS % 4 == 0 && TILE_M % kChunk == 0 && kGroupRows % kChunk == 0, "whole chunks");
static_assert(THREADS % kChunksPerColumn == 0, "whole columns per pass");

struct Operands {
    const SCALAR* x_t;      // [columns, pitch]: x transposed
    const SCALAR* values;   // [groups, slots, LENGTH]
    const int* columns;     // [row_tiles, stages, STAGE_COLUMNS]: columns of x, -1 for none
    const int* offsets;     // [row_tiles, stages, kGroups, STAGE_SLOTS]: where each slot's column is (column_info.cu)
    int pitch, groups, slots, stages;

    // Returns the index of the group that has the tile's first row.
    __device__ __forceinline__ int first_group() const { return static_cast<int>(blockIdx.y * 1LL * TILE_N / LENGTH); }

    __device__ __forceinline__ const int* tile_offsets() const {
        return offsets + static_cast<long long>(blockIdx.y) * stages * kGroups * STAGE_SLOTS;
    }
};

// Issues a thread's cp.async copies of x, one stage per call. Addresses are computed once and incremented: computing them at
// each copy adds 220 instructions per thread and stage to 1,024 FFMA.
struct ColumnCopier {
    const Operands& from;
    const int chunk = threadIdx.x % kChunksPerColumn;  // index of its 16 bytes in each column that the thread copies
    const int first = threadIdx.x / kChunksPerColumn;  // index in the stage of the thread's first column
    const char* tokens;                                // its chunk; PACKED: of column 0 of x, else of `first` in the next stage
    const int* columns;                                // PACKED: its first entry of `columns`, one stage ahead of `next`
    int next[kColumnPasses];                           // PACKED: the columns of its next copies, -1 for none

    __device__ __forceinline__ explicit ColumnCopier(const Operands& operands) : from(operands) {
        const long long first_token = static_cast<long long>(blockIdx.x) * TILE_M + chunk * kChunk;
        tokens = reinterpret_cast<const char*>(from.x_t + first_token + (PACKED ? 0LL : first * 1LL * from.pitch));
        columns = from.columns + static_cast<long long>(blockIdx.y) * from.stages * STAGE_COLUMNS + first;
        prefetch_columns();
    }

    // Loads the thread's column indices one stage ahead, so that copy() does not wait for them (NM-SpMM, section III-C2).
    __device__ __forceinline__ void prefetch_columns() {
        if (!PACKED) return;
#pragma unroll
        for (int pass = 0; pass < kColumnPasses; ++pass) {
            next[pass] = in_stage(pass) ? __ldg(columns + pass * kColumnsPerPass) : -1;
        }
        columns += STAGE_COLUMNS;
    }

    __device__ __forceinline__ bool in_stage(int pass) const {
        return STAGE_COLUMNS % kColumnsPerPass == 0 || pass * kColumnsPerPass + first < STAGE_COLUMNS;
    }

    __device__ __forceinline__ void copy(SCALAR* to) {
        const int bytes = from.pitch * static_cast<int>(sizeof(SCALAR));
        to += first * kColumnPitch + chunk * kChunk;
        const char* column = tokens;
#pragma unroll
        for (int pass = 0; pass < kColumnPasses; ++pass) {
            if (PACKED) column = tokens + static_cast<long long>(next[pass]) * bytes;
            // An entry of -1 copies zeros; a branch instead takes more instructions (1,353 per stage, not 1,256).
            const int source_bytes = !PACKED || next[pass] >= 0 ? 16 : 0;
            if (in_stage(pass)) cp_async_16(smem_address(to + pass * kColumnsPerPass * kColumnPitch), column, source_bytes);
            if (!PACKED) column += kColumnsPerPass * static_cast<long long>(bytes);
        }
        if (!PACKED) tokens += STAGE_COLUMNS * static_cast<long long>(bytes);
    }
};

// Main loop over all stages, `bytes` per buffer. `copy(buffer, last)` issues the copies of the next stage; `last`: it is the
// final one. `compute(buffer)` multiplies a stage whose copies have completed.
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
        __syncthreads();  // the stage's copies are visible; with STAGES > 1 all threads have read the buffer to fill next
        if (STAGES > 1) copy_next();
        compute(shared + reading);
        if (STAGES == 1) {
            __syncthreads();
            copy_next();
        }
        reading = reading == (STAGES - 1) * bytes ? 0 : reading + bytes;
    }
}
