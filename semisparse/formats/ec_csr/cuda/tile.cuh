// A mask tile (README.md has the figure) in shared memory, and how a lane expands its weights out of it.
//
// A tile is 16 rows by 256 columns. Lane 4 g + t owns 64 columns of rows g and g + 8. The tile has the masks of both rows of
// every lane, then the lane's values, row g's first: word i of every lane, at an address that falls into the lane's own bank. So
// reads have no conflicts and no lane needs a shuffle.
//
// A lane expands two columns, c and c + 1, at a time. Let a be the index of the value behind that of column c, the lower of
// both rows' values in one sequence. If both columns are stored, their values have the indices a - 1 and a. Word a / 2 holds
// both if a is odd; if a is even it holds the second, and the first is in the word that the previous pair of columns used. So
// one read and one funnel shift give both values. The two mask bits, spread by prmt, zero those of columns that are not stored.
// A value has 16 bits, so indices are kept in units of 16, which is what the funnel shift takes, and in bytes, as addresses: a dp4a adds the
// mask bits at 0x10 of each byte. Two dp4a, on the FMA pipe, instead of one and an LEA on the ALU pipe, which is the busier one.
//
// Compiled with WORDS, the most words per lane of a tile, and one: a lane past its last value reads one word more.

#pragma once

#include "expand_gemm/tile_shape.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"

constexpr int kUnitBytes = kWarpSize * 4;     // a word of every lane
constexpr int kMaskBytes = kWarpSize * 16;    // both rows' masks of every lane
constexpr int kTileBytes = kMaskBytes + WORDS * kUnitBytes;
constexpr Word kBit4 = 0x10101010u;

// Expands one row of a lane, four columns per step.
struct RowExpander {
    Word low, high;     // the mask's halves
    Word lane_bytes;
    Word count;         // 16 + 16 for each value before the row and up to the last column counted
    Word at;            // the values' shared-memory address, and 64 for each such value
    Word previous = 0;  // the word read last

    // Reads the word of the value at `address`, which is half a unit further for each value.
    __device__ __forceinline__ Word word_at(Word address) const {
        return ld_shared((address & ~(kUnitBytes - 1u)) | lane_bytes);
    }

    // The weights of columns 4 * step to 4 * step + 3, two per word; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ uint2 expand() {
        constexpr int by = step % 8;
        // Byte 0 is the column before these four; at step 0 it is column 63's bit and does not count yet.
        constexpr Word two = step ? 0x00000101u : 0x00000100u, four = step ? 0x01010101u : 0x01010100u;
        const Word half = step < 8 ? low : high;
        const Word bits = half << by;
        const Word after = step == 7 ? high : step == 15 ? low : half << (by + 1) % 8;
        const Word ones = (by < 3 ? half >> (3 - by) % 8 : half << (by + 5) % 8) & kBit4;
        const Word middle = __dp4a(ones, two, count), first = word_at(__dp4a(ones, 4 * two, at));
        count = __dp4a(ones, four, count), at = __dp4a(ones, 4 * four, at);
        const Word second = word_at(at);
        const uint2 weights{__funnelshift_l(previous, first, middle) & prmt(bits, bits, 0xaa99),
                            __funnelshift_l(first, second, count) & prmt(bits, after, 0xccbb)};
        previous = second;
        return weights;
    }
};

// Expands a lane's rows g and g + 8 of a tile at a shared-memory address that is a multiple of kUnitBytes.
struct TileExpander {
    RowExpander upper, lower;

    __device__ __forceinline__ TileExpander(Word tile, int lane) {
        const uint4 masks = ld_shared_v4(tile + lane * 16);
        upper.low = masks.x, upper.high = masks.y;
        lower.low = masks.z, lower.high = masks.w;
        upper.lane_bytes = lower.lane_bytes = lane * 4;
        const int before = __popc(masks.x) + __popc(masks.y);
        upper.count = 16, lower.count = 16 * before + 16;
        upper.at = tile + kMaskBytes, lower.at = tile + kMaskBytes + kUnitBytes / 2 * before;
        lower.previous = lower.word_at(lower.at);  // the first value of row g + 8 may be its second one
    }

    // The fragment of k-step `step`; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        const uint2 a = upper.expand<step>(), b = lower.expand<step>();
        fragment[0] = a.x, fragment[1] = b.x, fragment[2] = a.y, fragment[3] = b.y;
    }
};
