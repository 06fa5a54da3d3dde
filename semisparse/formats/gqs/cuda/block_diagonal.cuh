// One or two tokens: x as a block-diagonal B operand, so that each accumulator belongs to one group and codes need no
// dequantising.
//
//   B [64, 8] of a chunk      column 0  1  2  3  4  5  6  7
//   columns of group 0               x0 x1 .  .  .  .  .  .     x0, x1: that group's 16 columns of token 0 and of token 1
//   columns of group 1               .  .  x0 x1 .  .  .  .     . : zeros
//   columns of group 2               .  .  .  .  x0 x1 .  .
//   columns of group 3               .  .  .  .  .  .  x0 x1
//
// Accumulator [row, 2 g + j] is sum(code * x) over group g of token j. It is in the lane that holds that group of that row of
// A, which computes, and adds up in float32,
//
//   sum((code - zero) * scale * x) = scale * (sum(code * x) - zero * sum(x))
//
// Lane l feeds column l / 4 of B from group l % 4: x if l / 8 = l % 4, else zeros. While the weight's first stages are in
// flight, the CTA stores in shared memory, behind the warps' streams:
//
//   | zeros [kKTileColumns] | x [TOKENS, columns] in fragment order | -sum(x) of each group [groups, TOKENS] |
//
// x is padded with zeros to whole k-tiles. `Format` (mma_codes.cuh, mma_int8.cuh) is the type to which x is converted.

#pragma once

#include "chunk.cuh"
#include "fusion.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"
#include "rows.cuh"
#include "warp.cuh"

// Loads x from global memory. Thread t loads and converts the groups t, t + kThreads, ... Its first ones are loaded to
// registers before the weight's copies are issued: loaded after them, they arrived 3,800 cycles later. (A fused kernel must
// issue the weight's copies first, before griddepcontrol.wait.) With RMS_NORM x is normalised; all threads sum the squares.
struct StagedActivations {
    static constexpr int kPreloaded = ALIGNED_K ? 2 : 0;  // groups per thread

    const Element* x;            // [m, k]
    const Element* norm_weight;  // [k] with RMS_NORM
    Rows rows;
    int m, k;
    float scales[TOKENS];        // reciprocal root mean square of each token, with RMS_NORM
    Word first_weight[kGroupSize / 2];  // norm_weight at this thread's first group
    Word preloaded[kPreloaded + 1][kGroupSize / 2];

    // Reads only norm_weight: it may run before griddepcontrol.wait.
    __device__ __forceinline__ StagedActivations(const Element* x, Rows rows, int m, int k, const Element* norm_weight)
        : x(x), norm_weight(norm_weight), rows(rows), m(m), k(k) {
        if (RMS_NORM && index(0) < TOKENS * groups()) load_weight(first_weight, group_of(index(0)));
    }

    // Loads this thread's first groups of x, and with RMS_NORM sums all squares.
    __device__ __forceinline__ void load_first(float epsilon) {
#pragma unroll
        for (int j = 0; j < kPreloaded; ++j) {
            if (index(j) < TOKENS * groups()) load(preloaded[j], index(j));
        }
        if constexpr (RMS_NORM) sum_squares(epsilon);
    }

    __device__ __forceinline__ void load_weight(Word (&words)[kGroupSize / 2], int group) const {
        const int column = group * kGroupSize;
        if (column < k) load_x(words, reinterpret_cast<const unsigned short*>(norm_weight) + column, k - column);
    }

    // Computes `scales`.
    __device__ __forceinline__ void sum_squares(float epsilon) {
        __shared__ float warp_sums[WARPS][TOKENS];
        float sums[TOKENS] = {};
        for_each_loaded_group([&](const Word (&words)[kGroupSize / 2], int, int token) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < kGroupSize / 2; ++i) squares += squares_of(words[i]);
#pragma unroll
            for (int j = 0; j < TOKENS; ++j) sums[j] += token == j ? squares : 0.0f;
        });
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const float sum = warp_sum(sums[token]);
            if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][token] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = 0.0f;
            for (int warp = 0; warp < WARPS; ++warp) sum += warp_sums[warp][token];
            scales[token] = rsqrtf(sum / k + epsilon);
        }
    }


    // Groups per token, padding included.
    __device__ __forceinline__ int groups() const {
        return (k + kKTileColumns - 1) / kKTileColumns * (kKTileColumns / kGroupSize);
    }

    // This thread's j-th group, counted over all tokens; its token; and its group in that token.
    __device__ __forceinline__ static int index(int j) { return threadIdx.x + j * kThreads; }
    __device__ __forceinline__ int token_of(int i) const { return TOKENS > 1 && i >= groups(); }
    __device__ __forceinline__ int group_of(int i) const { return i - token_of(i) * groups(); }

    // Past the last token, the last one is loaded again; its outputs are not stored twice.
    __device__ __forceinline__ void load(Word (&words)[kGroupSize / 2], int i) const {
        const long long row = rows.x(min(token_of(i), m - 1)) * k;
        const int column = group_of(i) * kGroupSize;
        load_x(words, reinterpret_cast<const unsigned short*>(x) + row + column, k - column);
    }

    // Calls take(words of a group, group, token) for each of this thread's groups, normalised.
    template <typename Take> __device__ __forceinline__ void for_each_group(const Take& take) const {
        if constexpr (!RMS_NORM) {
            for_each_loaded_group(take);
        } else {
            for_each_loaded_group([&](const Word (&words)[kGroupSize / 2], int group, int token) {
                Word weight[kGroupSize / 2], result[kGroupSize / 2];
                const bool first = token * groups() + group == index(0);
                if (!first) load_weight(weight, group);
                const float scale = TOKENS > 1 && token ? scales[TOKENS - 1] : scales[0];
#pragma unroll
                for (int i = 0; i < kGroupSize / 2; ++i)
                    result[i] = group * kGroupSize < k ? normalised(words[i], first ? first_weight[i] : weight[i], scale) : 0;
                take(result, group, token);
            });
        }
    }

    // The same for groups before normalisation.
    template <typename Take> __device__ __forceinline__ void for_each_loaded_group(const Take& take) const {
        const int count = TOKENS * groups();
#pragma unroll
        for (int j = 0; j < kPreloaded; ++j) {
            if (index(j) < count) take(preloaded[j], group_of(index(j)), token_of(index(j)));
        }
#pragma unroll 1
        for (int i = index(kPreloaded); i < count; i += kThreads) {
            Word words[kGroupSize / 2];
            load(words, i);
            take(words, group_of(i), token_of(i));
        }
    }
};

// Format has the type `Value` of a column in shared memory, the type `Sum` of a group's sum, `prepare` (by the whole CTA), and
// `convert`, which puts a group into fragment order and returns its sum.
template <typename Format> struct BlockDiagonal {
    using Activations = StagedActivations;
    using Value = typename Format::Value;
    using Sum = typename Format::Sum;
    static constexpr int kValueBytes = sizeof(Value);
    static constexpr int kGroupVectors = kGroupSize * kValueBytes / 16;
    static constexpr int kZerosBytes = kKTileColumns * kValueBytes;

    struct Fragment {
        Word b[kGroupVectors][4];  // the lane's part of B
        Sum minus_sums[TOKENS];    // -sum(x) of the lane's group of A
    };

    Format format;
    float accumulators[4];                     // [row, token]: rows lane / 4 and 8 more; sums over the lane's groups, scaled
    Word b_address, b_base;                    // of the lane's part of B in shared memory: at the k-tile, and at column 0
    Word minus_sums_address, minus_sums_base;  // likewise
    int column_bytes;                          // by which b_address advances per column; 0 if the lane feeds zeros
    Fragment fragments[2];                     // double-buffered

    __device__ __forceinline__ BlockDiagonal(const Activations& activations, Word smem) {
        const int lane = threadIdx.x % 32, token = lane / 4 % 2, groups = activations.groups(), columns = groups * kGroupSize;
        const Word x_at = smem + kZerosBytes, minus_sums_at = x_at + TOKENS * columns * kValueBytes;
#pragma unroll 1
        for (int i = threadIdx.x; i < kZerosBytes / 16; i += kThreads) st_shared_v4(smem + 16 * i, uint4{0, 0, 0, 0});
        format.prepare(activations);
        activations.for_each_group([&](const Word (&words)[kGroupSize / 2], int group, int token) {
            Word converted[kGroupVectors][4];
            const Sum sum = format.convert(converted, words, token);
            const Word to = x_at + (token * groups + group) * (16 * kGroupVectors);
#pragma unroll
            for (int j = 0; j < kGroupVectors; ++j) st_shared_v4(to + 16 * j, converted[j]);
            st_shared(minus_sums_at + 4 * (group * TOKENS + token), Format::to_bits(-sum));
        });
        minus_sums_base = minus_sums_at + lane % 4 * TOKENS * 4;
        const bool on_diagonal = lane / 8 == lane % 4 && token < TOKENS;
        column_bytes = static_cast<int>(keep_in_register(on_diagonal ? static_cast<Word>(kValueBytes) : 0u));
        b_base = on_diagonal ? x_at + (token * columns + lane % 4 * kGroupSize) * kValueBytes : smem;
        clear();
        __syncthreads();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) accumulators[i] = 0.0f;
    }

    __device__ __forceinline__ void begin_range(int) {}

    __device__ __forceinline__ void begin_k_tile(int column, int) {
        b_address = opaque(b_base + column_bytes * column);
        minus_sums_address = opaque(minus_sums_base + column / kGroupSize * TOKENS * 4);
        load_fragment(0);
    }

    // Loads x for the k-tile's chunk `i`.
    __device__ __forceinline__ void load_fragment(int i) {
#pragma unroll
        for (int j = 0; j < kGroupVectors; ++j)
            ld_shared_ordered(fragments[i % 2].b[j], b_address + i * kChunkColumns * kValueBytes + 16 * j);
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const Word address = minus_sums_address + (i * kChunkGroups * TOKENS + token) * 4;
            fragments[i % 2].minus_sums[token] = Format::from_bits(ld_shared_ordered(address));
        }
    }

    // Adds scale * group_sum(i, -sum(x)) for the lane's group in one of its two rows, if kept; i is the index of the mma's
    // accumulator.
    template <typename GroupSum>
    __device__ __forceinline__ void accumulate(int row, const ChunkFragment& chunk, const Sum (&minus_sums)[TOKENS],
                                               Word lane_bit, const GroupSum& group_sum) {
        const float scale = low_element(chunk.scale[row]);
        const bool kept = chunk.mask[row] & lane_bit;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const int i = 2 * row + token;
            const float sum = group_sum(i, minus_sums[token]);
            if (kept) accumulators[i] += scale * sum;
        }
    }

    // Adds the accumulators of the four lanes that share a row; the first of them calls take(row, token, sum).
    template <typename Take> __device__ __forceinline__ void for_each_accumulator(const Take& take) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i % 2 >= TOKENS) continue;
            float sum = accumulators[i];
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            if (lane % 4 == 0) take(lane / 4 + i / 2 * 8, i % 2, sum);
        }
    }
};
