// A chunk of the weight, 16 rows by 4 groups of 16 columns: the A operand of a warp's mma instructions.
//
// Lane l holds group l % 4 of rows l / 4 and l / 4 + 8. Bit l of the low word of the chunk's mask is set if the first is kept,
// bit l of the high word if the second is: the mask's bits have the order of the lanes (README.md, "Layout").

#pragma once

#include "element.cuh"
#include "ptx/word.cuh"

constexpr int kRows = 16;            // per chunk and row tile
constexpr int kChunkGroups = 4;      // per row of a chunk
constexpr int kGroupSize = 16;       // columns
constexpr int kCodeWords = kGroupSize * BITS / 32;  // per group
constexpr int kChunkColumns = kChunkGroups * kGroupSize;
constexpr int kKTileColumns = CHUNKS_PER_K_TILE * kChunkColumns;  // a k-tile is one iteration of a warp's main loop
constexpr int kThreads = 32 * WARPS;

// The value whose bits are in the low half of a word.
__device__ __forceinline__ __half element_of(Word bits, const __half*) {
    return __ushort_as_half(static_cast<unsigned short>(bits));
}
__device__ __forceinline__ __nv_bfloat16 element_of(Word bits, const __nv_bfloat16*) {
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

// The Element in the low half of a word, as a float.
__device__ __forceinline__ float low_element(Word bits) { return to_float(element_of(bits, kElement)); }

struct ChunkFragment {
    Word mask[2];               // of rows 0 to 7 and 8 to 15; the same in all lanes
    Word codes[2][kCodeWords];  // of the lane's two groups; if one is dropped, those of some other group
    Word zero[2];               // likewise
    Word scale[2];              // likewise
};

// Loads one group of a token of x, two columns per word. Columns from `columns_left` on lie past K and become zero.
__device__ __forceinline__ void load_x(Word (&words)[kGroupSize / 2], const unsigned short* from, int columns_left) {
    if constexpr (ALIGNED_K) {
#pragma unroll
        for (int i = 0; i < kGroupSize / 8; ++i) {
            const uint4 part = reinterpret_cast<const uint4*>(from)[i];
            words[4 * i] = part.x;
            words[4 * i + 1] = part.y;
            words[4 * i + 2] = part.z;
            words[4 * i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kGroupSize / 2; ++i) {
            words[i] = 2 * i < columns_left ? from[2 * i] : 0;
            if (2 * i + 1 < columns_left) words[i] |= static_cast<Word>(from[2 * i + 1]) << 16;
        }
    }
}
