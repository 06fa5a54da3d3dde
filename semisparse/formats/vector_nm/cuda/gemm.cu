// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in float16 or bfloat16 on tensor cores (mma.m16n8k16), straight from kept
// vectors.
//
// Reads: the tensors of README.md, "Layout", and what column_info.cu writes: x transposed, column lists, entries.
// Grid: (tiles of TILE_M tokens, tiles of TILE_N rows). CTA: a warp for each 16 * WARP_M_TILES tokens x 32 rows of the
// tile.
// Shared memory: STAGES buffers of columns of x, [STAGE_COLUMNS, TILE_M + 16], kColumnBytes each.
// Warps: every thread copies its share of x; weights go from global memory straight to registers. Tokens are the m of the
// mma, rows its n, slots its k. Of each 16 slots a lane (g, t), g = lane / 4 and t = lane % 4, takes four. It loads eight
// tokens of each slot's column at once and its rows of the slot's weights; __byte_perm then pairs slots, as fragments need
// them. A fragment's elements may stand for any tokens and rows: they are those that a lane loads together, which are
// tokens 8 g to 8 g + 7 of every 64, and consecutive rows. It also stores them together. Slots are added in a fixed order:
// every run gives the same bits.
// Bank conflicts: shared memory serves eight lanes at a time, two g and all four t. A column begins 32 bytes further along
// the banks than the one before, so there is no conflict if the columns of the four t differ mod 4; column_info.cu orders
// slots so.
// Bound: shared memory. A column of x serves the rows of one group only, at most 32 of a warp: at LENGTH 32 the reads of x
// alone take 21 of every 26 cycles that the tensor cores need. 2,048 and 4,096 tokens: 0.56 to 0.67 of cuBLAS's speed at
// 16:32v32, 0.79 to 0.96 at 8:32v32 (results/h200/vector_nm-bfloat16.csv).
//
// Macros: WARP_M_TILES (m16 tiles per warp, a multiple of 4), and those of pipeline.cuh.

#include "ptx/mma.cuh"
#include "pipeline.cuh"

constexpr int kMmaK = 16;
constexpr int kLaneSlots = 4;  // per lane and mma step
constexpr int kWarpRows = 32;
constexpr int kSubtiles = WARP_M_TILES / 4;  // each has 64 tokens, eight per lane
constexpr int kWarpTokens = 64 * kSubtiles;
constexpr int kWarpsAlongM = TILE_M / kWarpTokens;
constexpr int kWarpGroupRows = LENGTH < kWarpRows ? LENGTH : kWarpRows;  // rows of a group in a warp's tile
constexpr int kWarpGroups = kWarpRows / kWarpGroupRows;
constexpr int kLaneRows = kWarpGroupRows / 8;  // rows per lane in each group: 1, 2 or 4
constexpr int kLaneWords = kLaneRows == 4 ? 2 : 1;
constexpr int kSteps = STAGE_SLOTS / kMmaK;
constexpr int kColumnStride = kColumnPitch * sizeof(SCALAR);  // bytes
constexpr Word kLow = 0x5410, kHigh = 0x7632;  // __byte_perm: the low, or high, halves of two words

static_assert(WARP_M_TILES % 4 == 0 && TILE_M % kWarpTokens == 0, "whole subtiles");
static_assert(THREADS == kWarp * kWarpsAlongM * (TILE_N / kWarpRows), "one warp per warp tile");
static_assert(STAGE_SLOTS % kMmaK == 0 && LENGTH % 8 == 0, "whole mma steps");

using Accumulators = float[kSubtiles][4][kWarpGroups * kLaneRows][4];  // by subtile, pair of tokens, n8 tile of the mma

// A lane's four slots of an mma step: the column's number in the stage and, above it, the slot; see column_info.cu.
struct Entries {
    Word of_slot[kLaneSlots];

    __device__ __forceinline__ int slot(int i) const { return static_cast<int>(of_slot[i]) >> 16; }
};

struct StageEntries {
    Entries of[kSteps][kWarpGroups];
};

// The column numbers alone, two per word: all that is needed once the weights are being loaded.
struct StageColumns {
    Word pairs[kSteps][kWarpGroups][kLaneSlots / 2];

    __device__ __forceinline__ explicit StageColumns(const StageEntries& stage) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int group = 0; group < kWarpGroups; ++group) {
                const Word(&entries)[kLaneSlots] = stage.of[step][group].of_slot;
                pairs[step][group][0] = __byte_perm(entries[0], entries[1], kLow);
                pairs[step][group][1] = __byte_perm(entries[2], entries[3], kLow);
            }
        }
    }

    __device__ __forceinline__ int column(int step, int group, int i) const {
        const Word pair = pairs[step][group][i / 2];
        return i % 2 ? pair >> 16 : pair & 0xffff;
    }
};

using Weights = Word[kWarpGroups][kLaneSlots][kLaneWords];  // of an mma step: the lane's rows, two per word

// A lane's loads of entries and weights from global memory.
struct WeightLoader {
    const uint4* entries;  // of the stage whose entries are loaded next
    const SCALAR* values;  // the lane's rows in the warp's first group, of the stage whose weights are loaded next
    int left;              // stages whose entries are still to be loaded
    int group_offset[kWarpGroups];

    __device__ __forceinline__ WeightLoader(const Operands& from, int first_row) : left(from.stages) {
        const int lane = threadIdx.x % kWarp;
        const int group = first_row / kGroupRows;
        const int row = static_cast<int>((blockIdx.y * 1LL * TILE_N + first_row) % LENGTH);
        // Past the last group its values are read again: those rows are not stored.
        const int last = from.groups - 1;
        const int own = min(from.first_group() + group, last);
#pragma unroll
        for (int i = 0; i < kWarpGroups; ++i) {
            group_offset[i] = (min(from.first_group() + group + i, last) - own) * from.slots * LENGTH;
        }
        entries = reinterpret_cast<const uint4*>(from.tile_offsets() + group * STAGE_SLOTS) + lane % 4;
        values = from.values + static_cast<long long>(own) * from.slots * LENGTH + row + lane / 4 * kLaneRows;
    }

    // Past the last stage there are no slots. A select, not a branch around the loads: loads of x would not move across a
    // branch.
    __device__ __forceinline__ void load_entries(StageEntries& to) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int group = 0; group < kWarpGroups; ++group) {
                const int at = (group * STAGE_SLOTS + step * kMmaK) / 4;
                const uint4 four = left > 0 ? __ldg(entries + at) : uint4{~0u, ~0u, ~0u, ~0u};
                Word(&of_slot)[kLaneSlots] = to.of[step][group].of_slot;
                of_slot[0] = four.x;
                of_slot[1] = four.y;
                of_slot[2] = four.z;
                of_slot[3] = four.w;
            }
        }
        entries += kGroups * STAGE_SLOTS / 4;
        --left;
    }

    __device__ __forceinline__ void load_weights(Weights& to, const Entries (&of)[kWarpGroups]) const {
#pragma unroll
        for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
            for (int i = 0; i < kLaneSlots; ++i) {
                const int slot = of[group].slot(i);
                Word(&words)[kLaneWords] = to[group][i];
                words[0] = 0;
                words[kLaneWords - 1] = 0;
                if (slot < 0) continue;  // past the last slot
                const SCALAR* rows = values + group_offset[group] + slot * LENGTH;
                if (kLaneRows == 4) {
                    const uint2 both = __ldg(reinterpret_cast<const uint2*>(rows));
                    words[0] = both.x;
                    words[kLaneWords - 1] = both.y;
                } else if (kLaneRows == 2) {
                    words[0] = __ldg(reinterpret_cast<const Word*>(rows));
                } else {
                    words[0] = __ldg(reinterpret_cast<const unsigned short*>(rows));
                }
            }
        }
    }
};

using XFragment = Word[kLaneSlots][4];  // eight tokens of a lane's four columns

__device__ __forceinline__ void load_x(XFragment& to, const StageColumns& stage, int step, int group, const char* columns,
                                       int subtile) {
#pragma unroll
    for (int i = 0; i < kLaneSlots; ++i) {
        const char* column = columns + stage.column(step, group, i) * kColumnStride;
        column += subtile * 64 * static_cast<int>(sizeof(SCALAR));
        const uint4 eight = *reinterpret_cast<const uint4*>(column);
        to[i][0] = eight.x;
        to[i][1] = eight.y;
        to[i][2] = eight.z;
        to[i][3] = eight.w;
    }
}

__device__ __forceinline__ void multiply(Accumulators& d, const XFragment& x, const Weights& weights, int group, int subtile) {
    const Word(&w)[kLaneSlots][kLaneWords] = weights[group];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const Word a[4] = {__byte_perm(x[0][pair], x[1][pair], kLow), __byte_perm(x[0][pair], x[1][pair], kHigh),
                           __byte_perm(x[2][pair], x[3][pair], kLow), __byte_perm(x[2][pair], x[3][pair], kHigh)};
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) {
            const Word half = row % 2 ? kHigh : kLow;
            mma_m16n8k16(d[subtile][pair][group * kLaneRows + row], a, __byte_perm(w[0][row / 2], w[1][row / 2], half),
                         __byte_perm(w[2][row / 2], w[3][row / 2], half), static_cast<const SCALAR*>(nullptr));
        }
    }
}

struct alignas(sizeof(SCALAR) * 2 * kLaneRows) Rows {
    SCALAR of[2 * kLaneRows];
};

// A lane stores, of each of its tokens, 2 * kLaneRows consecutive rows of each group.
__device__ __forceinline__ void epilogue(const Accumulators& d, int first_token, int first_row, const SCALAR* bias, SCALAR* y,
                                         int m, int n, bool aligned) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
        const int row = blockIdx.y * TILE_N + first_row + group * kWarpGroupRows + lane % 4 * 2 * kLaneRows;
        float added[2 * kLaneRows];
#pragma unroll
        for (int i = 0; i < 2 * kLaneRows; ++i) added[i] = bias && row + i < n ? to_float(bias[row + i]) : 0.0f;
#pragma unroll
        for (int j = 0; j < kSubtiles * 8; ++j) {
            const int token = blockIdx.x * TILE_M + first_token + j / 8 * 64 + lane / 4 * 8 + j % 8;
            if (token >= m) continue;
            Rows out;
#pragma unroll
            for (int i = 0; i < 2 * kLaneRows; ++i) {
                const float(&of)[4] = d[j / 8][j % 8 / 2][group * kLaneRows + i % kLaneRows];
                store(out.of + i, of[j % 2 * 2 + i / kLaneRows] + added[i]);
            }
            SCALAR* to = y + static_cast<long long>(token) * n + row;
            if (aligned && row + 2 * kLaneRows <= n) {
                *reinterpret_cast<Rows*>(to) = out;
            } else {
#pragma unroll
                for (int i = 0; i < 2 * kLaneRows; ++i)
                    if (row + i < n) to[i] = out.of[i];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) semisparse_vector_nm_gemm(
    const SCALAR* __restrict__ x_t, const SCALAR* __restrict__ values, const int* __restrict__ columns,
    const int* __restrict__ offsets, const SCALAR* __restrict__ bias, SCALAR* __restrict__ y,
    int m, int n, int pitch, int groups, int slots, int stages,
    int aligned  // whether every row of y begins at a multiple of 16 bytes
) {
    extern __shared__ uint4 shared[];
    const Operands operands{x_t, values, columns, offsets, pitch, groups, slots, stages};
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int first_token = warp % kWarpsAlongM * kWarpTokens;
    const int first_row = warp / kWarpsAlongM * kWarpRows;
    ColumnCopier copier(operands);
    WeightLoader loader(operands, first_row);
    // Entries are loaded a stage before their weights, and weights a stage before they are multiplied. Closer together the
    // compiler waits for both at once: 0.56 instead of 0.63 of cuBLAS's speed at 50 % (docs/kernels/vector_nm.md).
    StageEntries entries, next_entries;
    Weights weights[kSteps];
    loader.load_entries(entries);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) loader.load_weights(weights[step], entries.of[step]);
    loader.load_entries(next_entries);
    Accumulators d = {};
    for_each_stage<kColumnBytes>(
        stages, reinterpret_cast<char*>(shared),
        [&](char* buffer, bool last) {
            copier.copy(reinterpret_cast<SCALAR*>(buffer));
            if (!last) copier.prefetch_columns();
        },
        [&](const char* buffer) {
            const char* columns = buffer + (first_token + lane / 4 * 8) * sizeof(SCALAR);
            const StageColumns stage(entries);
            entries = next_entries;
            loader.values += STAGE_SLOTS * LENGTH;
            loader.load_entries(next_entries);
            constexpr int parts = kWarpGroups * kSubtiles;  // per step
            XFragment x[2];
            load_x(x[0], stage, 0, 0, columns, 0);
#pragma unroll
            for (int i = 0; i < kSteps * parts; ++i) {
                const int next = i + 1;
                // The next part's x is loaded while this one is multiplied; the next stage's weights have a whole stage.
                if (next < kSteps * parts) {
                    load_x(x[next % 2], stage, next / parts, next % parts / kSubtiles, columns, next % kSubtiles);
                }
                multiply(d, x[i % 2], weights[i / parts], i % parts / kSubtiles, i % kSubtiles);
                if (next % parts == 0) loader.load_weights(weights[i / parts], entries.of[i / parts]);
            }
        });
    epilogue(d, first_token, first_row, bias, y, m, n, aligned != 0);
}
