// A chunk of a gqs weight as a warp's lanes hold it: 16 rows by 4 groups of 16 columns. Lane l looks after group l % 4 of the
// rows l / 4 and l / 4 + 8; a chunk's bit l (l + 32 for the second row) says whether the weight has it.

#pragma once

#include "primitives.cuh"

constexpr int kRows = 16;
constexpr int kSize = 16;                  // columns of a group
constexpr int kColumns = 4 * kSize;        // of a chunk
constexpr int kWords = kSize * BITS / 32;  // of a group's codes

struct Chunk {
    Word mask[2];           // of the rows 0 to 7 and 8 to 15, the same in every lane
    Word codes[2][kWords];  // of the lane's two rows; another group's where its own is dropped
    Word zero[2];           // likewise
    Word scale[2];          // likewise
};

// A group's columns of a token, the first one lowest; zeros where they are not among the `left` up to k. Value: unsigned short or
// signed char.
template <typename Value> __device__ __forceinline__ void read_x(Word (&words)[kSize * sizeof(Value) / 4], const Value* place, int left) {
#if WHOLE
    read_words<kSize * sizeof(Value) / 4>(words, place);
#else
    constexpr int per_word = 4 / sizeof(Value);
#pragma unroll
    for (int i = 0; i < kSize / per_word; ++i) {
        words[i] = 0;
#pragma unroll
        for (int j = 0; j < per_word; ++j) {
            const int column = i * per_word + j;
            if (column >= left) continue;
            words[i] |= (static_cast<Word>(__ldg(place + column)) & (1u << 8 * sizeof(Value)) - 1) << 32 / per_word * j;
        }
    }
#endif
}
