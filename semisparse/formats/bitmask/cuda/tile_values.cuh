// A tile of values in the layout `tiles` (README.md has the figure) in shared memory, and how a lane expands its weights out of it.
//
// A tile is 16 rows by 256 columns, copied as it is stored: word i (values 2 i and 2 i + 1) of every lane for its row g, then the
// same for its row g + 8, and 512 bytes of masks behind all words. Lane 4 g + t owns block t (64 columns) of these two rows. All
// of its words lie in its own bank, so reads have no conflicts and no lane needs a shuffle.
//
// A lane expands two columns, c and c + 1, at a time. Let a be the number of values up to and including column c. If both
// columns are stored, their values have the indices a - 1 and a. Word a / 2 holds both if a is odd; if a is even it holds the
// second, and the first is in the word that the previous pair of columns used. So one read and one funnel shift give both
// values. The two mask bits, spread by prmt, zero those of columns that are not stored: a lane past its last value reads one word
// more, of masks. A value has 16 bits, so prefix counts
// are kept in units of 16, which is what the funnel shift takes: one dp4a adds the mask bits at 0x10 of each byte.
//
// Compiled with KEEP, the values per block.

#pragma once

#include "ptx/integer.cuh"
#include "ptx/shared.cuh"

constexpr int kMaskBytes = kWarpSize * 16;       // per tile: both rows' masks of every lane
constexpr int kMaskStart = (KEEP + 1) / 2 * 2 * kWordRowBytes;  // behind the values
constexpr int kTileBytes = kMaskStart + kMaskBytes;
constexpr Word kBit4 = 0x10101010u;

// Expands one row of a lane's block, four columns per step.
template <int offset>
struct RowExpander {
    Word low, high;      // the mask's halves
    Word base;           // shared-memory address of the lane's first word, less 128
    Word count = 16;     // 16 + 16 for each value up to the last column counted
    Word previous = 0;   // the word read last

    // The weights of columns 4 * step to 4 * step + 3, two per word; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ uint2 expand() {
        constexpr int by = step % 8;
        const Word half = step < 8 ? low : high;
        const Word bits = half << by;
        const Word after = step == 7 ? high : step == 15 ? low : half << (by + 1) % 8;
        const Word ones = (by < 3 ? half >> (3 - by) % 8 : half << (by + 5) % 8) & kBit4;
        // Byte 0 is the column before these four; at step 0 it is column 63's bit and does not count yet.
        const Word middle = __dp4a(ones, step ? 0x00000101u : 0x00000100u, count);
        count = __dp4a(ones, step ? 0x01010101u : 0x01010100u, count);
        const Word first = ld_shared<offset>(middle * 8 + base & ~128u);
        const Word second = ld_shared<offset>(count * 8 + base & ~128u);
        const uint2 weights{__funnelshift_l(previous, first, middle) & prmt(bits, bits, 0xaa99),
                            __funnelshift_l(first, second, count) & prmt(bits, after, 0xccbb)};
        previous = second;
        return weights;
    }
};

// Expands a lane's rows g and g + 8 of a tile at a shared-memory address that is a multiple of 256.
struct TileExpander {
    RowExpander<0> upper;
    RowExpander<kWordRowBytes> lower;

    __device__ __forceinline__ TileExpander(Word tile, int lane) {
        const uint4 masks = ld_shared_v4(tile + kMaskStart + lane * 16);
        upper.low = masks.x, upper.high = masks.y;
        lower.low = masks.z, lower.high = masks.w;
        upper.base = lower.base = tile + lane * 4 - 128;
    }

    // The fragment of k-step `step`; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        const uint2 a = upper.expand<step>(), b = lower.expand<step>();
        fragment[0] = a.x, fragment[1] = b.x, fragment[2] = a.y, fragment[3] = b.y;
    }
};
