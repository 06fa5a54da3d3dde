// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in float32 on CUDA cores, without TF32: the paper's kernel (section III).
//
// Reads: the tensors of README.md, "Layout", and what column_info.cu writes: x transposed, column lists, offsets.
// Grid: (tiles of TILE_M tokens, tiles of TILE_N rows). CTA: a warp for each 8 * THREAD_M tokens x 32 rows of the tile.
// Shared memory: STAGES buffers of kStageBytes: columns of x [STAGE_COLUMNS, TILE_M], values [kGroups, STAGE_SLOTS,
// kGroupRows], offsets [kGroups, STAGE_SLOTS] of 4 bytes.
// Warps: every thread copies its share of a stage, then computes THREAD_M tokens x 8 rows in registers (equation 6). A lane
// is one of eight `a`, which hold tokens 4 a to 4 a + 3 of every 32, so that a warp reads a column of x without bank
// conflicts, and one of four `b`, which hold 8 rows of one group. From LENGTH 32 on a warp's rows are one group, and its
// lanes share the column. Slots are added in their order: every run gives the same bits.
// Bound: FMA issue. 128 x 128 tiles at 16:32v32 take 79 % of issue slots and 71.5 % of FMA peak (H200, ncu); cuBLAS reaches
// 77 %.
//
// Macros: THREAD_M (tokens per thread: 4, 8 or 16), and those of pipeline.cuh; SCALAR is float.

#include "pipeline.cuh"

constexpr int kThreadRows = 8;
constexpr int kWarpRows = 32;
constexpr int kWarpTokens = 8 * THREAD_M;
constexpr int kWarpsAlongM = TILE_M / kWarpTokens;
// From a thread's first four rows to its next four.
constexpr int kRowStep = LENGTH < kWarpRows ? (LENGTH < 8 ? 4 : LENGTH / 2) : kWarpRows / 2;
constexpr int kThreadGroups = LENGTH < 8 ? 2 : 1;  // groups that a thread's rows lie in

static_assert(THREADS == kWarp * kWarpsAlongM * (TILE_N / kWarpRows), "one warp per warp tile");

// The layout of a stage in shared memory
constexpr int kSlotPitch = kGroupRows;
// Groups of 4 to 16 rows are read side by side: a slot's length between them avoids bank conflicts.
constexpr int kGroupPitch = STAGE_SLOTS * kSlotPitch + (kGroupRows < 32 ? kSlotPitch : 0);
constexpr int kValueBytes = kGroups * kGroupPitch * sizeof(SCALAR);
constexpr int kOffsetBytes = kGroups * STAGE_SLOTS * 4;
constexpr int kStageBytes = kColumnBytes + kValueBytes + kOffsetBytes;
constexpr int kChunksPerSlot = kGroupRows / kChunk;
constexpr int kValueChunks = kGroups * STAGE_SLOTS * kChunksPerSlot;
constexpr int kValuePasses = (kValueChunks + THREADS - 1) / THREADS;
// Whether a thread's chunks have the same offset in their group, or slot, in every pass.
constexpr bool kEven = STAGE_SLOTS * kChunksPerSlot % THREADS == 0 || THREADS % (STAGE_SLOTS * kChunksPerSlot) == 0;

struct Stage {
    char* base;

    __device__ __forceinline__ SCALAR* columns() const { return reinterpret_cast<SCALAR*>(base); }
    __device__ __forceinline__ SCALAR* values() const { return reinterpret_cast<SCALAR*>(base + kColumnBytes); }
    __device__ __forceinline__ int* offsets() const { return reinterpret_cast<int*>(base + kColumnBytes + kValueBytes); }
};

// The 16-byte chunk number `index` of a stage's values: group by group, slot by slot.
struct ValueChunk {
    int group, slot, element;

    __device__ __forceinline__ explicit ValueChunk(int index)
        : group(index / (STAGE_SLOTS * kChunksPerSlot)),
          slot(index / kChunksPerSlot % STAGE_SLOTS),
          element(index % kChunksPerSlot * kChunk) {}

    __device__ __forceinline__ int shared_offset() const { return group * kGroupPitch + slot * kSlotPitch + element; }
};

// A thread's copies of values and offsets, stage after stage.
struct ValueCopier {
    const Operands& from;
    const int* offsets;                         // of the next stage
    const SCALAR* values;                       // of the next stage, in the tile's first group
    int left;                                   // slots that are still to be copied
    int sources[kValuePasses];                  // offsets of the thread's chunks from `values`
    int destinations[kEven ? 1 : kValuePasses]; // and in the stage's values in shared memory

    __device__ __forceinline__ explicit ValueCopier(const Operands& operands) : from(operands), left(operands.slots) {
        const long long first_row = static_cast<long long>(blockIdx.y) * TILE_N;
        offsets = from.tile_offsets() + threadIdx.x * 4;
        values = from.values + static_cast<long long>(from.first_group()) * from.slots * LENGTH + first_row % LENGTH;
#pragma unroll
        for (int pass = 0; pass < kValuePasses; ++pass) {
            const ValueChunk mine(threadIdx.x + pass * THREADS);
            sources[pass] = (group(mine) * from.slots + mine.slot) * LENGTH + mine.element;
            if (!kEven || pass == 0) destinations[kEven ? 0 : pass] = mine.shared_offset();
        }
    }

    // Past the last group its values are read again: those rows are not stored.
    __device__ __forceinline__ int group(const ValueChunk& mine) const {
        return min(mine.group, from.groups - 1 - from.first_group());
    }

    __device__ __forceinline__ void copy(const Stage& to) {
        copy_values(to.values());
#pragma unroll
        for (int i = 0; i < kGroups * STAGE_SLOTS; i += 4 * THREADS) {
            if (i + threadIdx.x * 4 < kGroups * STAGE_SLOTS) {
                cp_async_16(smem_address(to.offsets() + i + threadIdx.x * 4), offsets + i);
            }
        }
        offsets += kGroups * STAGE_SLOTS;
        values += STAGE_SLOTS * LENGTH;
        left -= STAGE_SLOTS;
    }

    __device__ __forceinline__ void copy_values(SCALAR* to) const {
        if (left >= STAGE_SLOTS) {
#pragma unroll
            for (int pass = 0; pass < kValuePasses; ++pass) {
                if (kValueChunks % THREADS && threadIdx.x + pass * THREADS >= kValueChunks) continue;
                const int at = kEven ? destinations[0] + ValueChunk(pass * THREADS).shared_offset()
                                     : destinations[kEven ? 0 : pass];
                cp_async_16(smem_address(to + at), values + sources[pass]);
            }
            return;
        }
        // The last stage: zeros past the last slot.
#pragma unroll 1
        for (int i = threadIdx.x; i < kValueChunks; i += THREADS) {
            const ValueChunk mine(i);
            const bool stored = mine.slot < left;
            const SCALAR* source = values + (group(mine) * from.slots + (stored ? mine.slot : 0)) * LENGTH + mine.element;
            cp_async_16(smem_address(to + mine.shared_offset()), source, stored ? 16 : 0);
        }
    }
};

// The tokens and rows that a thread computes, inside the CTA's tile.
struct ThreadTile {
    int token, row;  // its first of each

    __device__ __forceinline__ ThreadTile() {
        const int warp = threadIdx.x / kWarp;
        const int lane = threadIdx.x % kWarp;
        constexpr int lanes = kRowStep / 4;  // values of b that share a group
        // Lanes 1 apart share tokens, lanes 2 apart share rows: 16-byte loads of both then take half the wavefronts (2 to
        // 3 % faster).
        const int a = lane / 2 % 8, b = lane % 2 + lane / 16 * 2;
        token = warp % kWarpsAlongM * kWarpTokens + a * 4;
        row = warp / kWarpsAlongM * kWarpRows + b / lanes * 2 * kRowStep + b % lanes * 4;
    }

    // Returns the first of the thread's first (half 0) or second (half 1) four rows.
    __device__ __forceinline__ int rows(int half) const { return row + half * kRowStep; }
};

using Accumulators = float[THREAD_M][kThreadRows];

__device__ __forceinline__ void load4(float* to, const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

__device__ __forceinline__ void multiply(Accumulators& d, const Stage& stage, const ThreadTile& tile) {
    const char* columns = reinterpret_cast<const char*>(stage.columns() + tile.token);
    const float* values[2];
    const int* offsets[kThreadGroups];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int group = tile.rows(half) / kGroupRows;
        values[half] = stage.values() + group * kGroupPitch + tile.rows(half) % kGroupRows;
        if (half < kThreadGroups) offsets[half] = stage.offsets() + group * STAGE_SLOTS;
    }
#pragma unroll(STAGE_SLOTS % 8 == 0 ? 8 : 4)
    for (int slot = 0; slot < STAGE_SLOTS; ++slot) {
        float w[kThreadRows];
#pragma unroll
        for (int half = 0; half < 2; ++half) load4(w + 4 * half, values[half] + slot * kSlotPitch);
#pragma unroll
        for (int group = 0; group < kThreadGroups; ++group) {
            const float* column = reinterpret_cast<const float*>(columns + offsets[group][slot]);
            float x[THREAD_M];
#pragma unroll
            for (int i = 0; i < THREAD_M; i += 4) load4(x + i, column + i / 4 * 32);
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
                for (int j = group * 4; j < (group + 1) * kThreadRows / kThreadGroups; ++j) d[i][j] += x[i] * w[j];
            }
        }
    }
}

__device__ __forceinline__ void epilogue(const Accumulators& d, const ThreadTile& tile, const float* bias, float* y,
                                         int m, int n, bool aligned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = blockIdx.y * TILE_N + tile.rows(half);
        float added[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) added[j] = bias && row + j < n ? bias[row + j] : 0.0f;
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
            const int token = blockIdx.x * TILE_M + tile.token + i / 4 * 32 + i % 4;
            if (token >= m) continue;
            float* to = y + static_cast<long long>(token) * n + row;
            float out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) out[j] = d[i][4 * half + j] + added[j];
            if (aligned && row + 3 < n) {
                *reinterpret_cast<float4*>(to) = float4{out[0], out[1], out[2], out[3]};
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (row + j < n) to[j] = out[j];
            }
        }
    }
}

// Sixteen warps per SM where a thread has 64 accumulators: without the bound ptxas takes a few registers too many for that.
// Column lists of packed stages and a second group per thread do not fit beside them: they spill on sm_80 and sm_89.
constexpr int kThreadsPerSM = THREAD_M == 16 || PACKED || kThreadGroups == 2 ? 256 : 512;

extern "C" __global__ void __launch_bounds__(THREADS, kThreadsPerSM / THREADS) semisparse_vector_nm_gemm_fp32(
    const float* __restrict__ x_t, const float* __restrict__ values, const int* __restrict__ columns,
    const int* __restrict__ offsets, const float* __restrict__ bias, float* __restrict__ y,
    int m, int n, int pitch, int groups, int slots, int stages,
    int aligned  // whether every row of y begins at a multiple of 16 bytes
) {
    extern __shared__ uint4 shared[];
    const Operands operands{x_t, values, columns, offsets, pitch, groups, slots, stages};
    ColumnCopier column_copier(operands);
    ValueCopier value_copier(operands);
    const ThreadTile tile;
    Accumulators d = {};
    for_each_stage<kStageBytes>(
        stages, reinterpret_cast<char*>(shared),
        [&](char* buffer, bool last) {
            const Stage to{buffer};
            column_copier.copy(to.columns());
            value_copier.copy(to);
            if (!last) column_copier.prefetch_columns();
        },
        [&](char* buffer) { multiply(d, Stage{buffer}, tile); });
    epilogue(d, tile, bias, y, m, n, aligned != 0);
}
