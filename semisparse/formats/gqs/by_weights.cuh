// Multiplies by weights: codes become SCALARs first. For many tokens, which share that work.
//
// Four m16n8k16 products take a chunk, the weights as their 16-row operand and 8 tokens in their columns. They take a lane's 16
// columns in their own order: the columns of a fragment are a permutation that weights and x share, so a lane needs no other
// lane's weights.

#pragma once

#include "dequantise.cuh"
#include "stream.cuh"

constexpr int kSets = TOKENS / 8;
constexpr int kAhead = TOKENS == 16 && !WHOLE ? 1 : 2;  // chunks of x, as registers allow
static_assert(BATCH % kAhead == 0, "a chunk's place is known at compile time");

struct Product {
    // Of a chunk: the lane's columns, by sets of 8 tokens.
    struct X {
        Word words[kSets][8];
    };

    struct Asked {
        const SCALAR* x;
        int m, k;
    };

    float sums[kSets][4];
    const unsigned short* place[kSets];  // of the lane's columns of its tokens
    Constants constants;
    int k;
    int column, next;  // of the strip, and of the one after it
    X x[kAhead];       // of the chunks to come

    // Tokens past the last repeat it and are not kept.
    __device__ __forceinline__ Product(const Asked& asked, Word) : constants(asked.k), k(asked.k) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            const long long token = min(lane / 4 + 8 * set, asked.m - 1);
            place[set] = reinterpret_cast<const unsigned short*>(asked.x) + token * k + lane % 4 * kSize;
        }
        clear();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * kSets; ++i) sums[i / 4][i % 4] = 0.0f;
    }

    __device__ __forceinline__ void begin_run(int column) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) read(i, column + i * kColumns);
    }

    __device__ __forceinline__ void begin_strip(int column, int next) {
        this->column = column;
        this->next = next;
    }

    // The chunk of x that begins at a column.
    __device__ __forceinline__ void read(int i, int column) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            read_x(x[i].words[set], place[set] + column, k - column - static_cast<int>(threadIdx.x % 4) * kSize);
        }
    }

    __device__ __forceinline__ void add(const Chunk& chunk, int index, Word bit) {
        const X& x = this->x[index % kAhead];
        Word upper[8], lower[8];
        dequantise(upper, chunk.codes[0], chunk.scale[0] * (chunk.mask[0] & bit ? 0x10001u : 0), chunk.zero[0], constants);
        dequantise(lower, chunk.codes[1], chunk.scale[1] * (chunk.mask[1] & bit ? 0x10001u : 0), chunk.zero[1], constants);
        const SCALAR* tag = nullptr;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const Word rows[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
#pragma unroll
            for (int set = 0; set < kSets; ++set) mma_m16n8k16(sums[set], rows, x.words[set][i], x.words[set][i + 1], tag);
        }
        const int after = index + kAhead;
        read(index % kAhead, after < BATCH ? column + after * kColumns : next + (after - BATCH) * kColumns);
    }

    // What is added up so far, of rows lane / 4 and 8 more and two tokens of each 8.
    template <typename Take> __device__ __forceinline__ void each(const Take& take) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4 * kSets; ++i) {
            take(lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8, sums[i / 4][i % 4]);
        }
    }

    __device__ __forceinline__ float final(float sum, int) const { return sum; }
};
