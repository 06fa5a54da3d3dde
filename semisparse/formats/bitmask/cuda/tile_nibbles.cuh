// A tile of 4-bit codes in the layout `tiles` (README.md has the figure) in shared memory, and how a lane expands its weights.
//
// A tile is 16 rows by 256 columns. Lane 4 g + t owns block t (64 columns) of rows g and g + 8. There is no mask: every column has
// a code. The tile has 128 bytes of scales, then four times 16 bytes of every lane, with 32 columns each: two for its row g, two
// for its row g + 8. A word has the codes of columns 0, 2, 4, 6, 1, 3, 5, 7, so that a shift brings two neighbours to the low
// ends of its halves.
//
// Compiled with SCALAR.

#pragma once

#include "dequantise.cuh"
#include "ptx/shared.cuh"

constexpr int kTileBytes = kWordRowBytes + 4 * kWarpSize * 16;

// Expands one row of a lane's block, four columns per step.
struct RowExpander {
    uint4 first, second;  // the codes of 32 columns each
    Pair scale;
    Word high_bytes;      // in a register, since LOP3 takes one constant

    __device__ __forceinline__ RowExpander(Word codes, Pair scale)
        : first(ld_shared_v4(codes)), second(ld_shared_v4(codes + kWarpSize * 16)), scale(scale), high_bytes(in_register(kHighBytes, codes)) {}

    __device__ __forceinline__ Word weights_of(Word codes) const {
        return scaled(codes & 0x000f000fu | high_bytes, kHighBytes + 0x00080008u, scale);
    }

    // The weights of columns 4 * step to 4 * step + 3, two per word.
    template <int step>
    __device__ __forceinline__ uint2 expand() {
        constexpr int index = step / 2 % 4, shift = step % 2 * 8;
        const uint4& half = step < 8 ? first : second;
        const Word word = index == 0 ? half.x : index == 1 ? half.y : index == 2 ? half.z : half.w;
        return {weights_of(word >> shift), weights_of(word >> shift + 4)};
    }
};

// Expands a lane's rows g and g + 8 of a tile at a shared-memory address.
struct TileExpander {
    RowExpander upper, lower;

    __device__ __forceinline__ TileExpander(Word tile, int lane) : TileExpander(tile, lane, ld_shared(tile + lane * 4)) {}
    __device__ __forceinline__ TileExpander(Word tile, int lane, Word scales)
        : upper(tile + kWordRowBytes + lane * 16, scale_of(scales, 0)),
          lower(tile + kWordRowBytes + (2 * kWarpSize + lane) * 16, scale_of(scales, 1)) {}

    // The fragment of k-step `step`.
    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        const uint2 a = upper.expand<step>(), b = lower.expand<step>();
        fragment[0] = a.x, fragment[1] = b.x, fragment[2] = a.y, fragment[3] = b.y;
    }
};
