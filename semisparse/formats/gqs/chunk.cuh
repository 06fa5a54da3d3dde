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

// A group's columns of a token, the first one lowest; zeros where they are not among the `left` up to k.
__device__ __forceinline__ void read_x(Word (&words)[kSize / 2], const unsigned short* place, int left) {
#if WHOLE
    read_words<kSize / 2>(words, place);
#else
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
        words[i] = 2 * i < left ? place[2 * i] : 0;
        if (2 * i + 1 < left) words[i] |= static_cast<Word>(place[2 * i + 1]) << 16;
    }
#endif
}
