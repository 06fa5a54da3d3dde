// A tile of the layout `tiles` (16 rows by 256 columns, a warp's work) and how a lane reads its own weights out of it.
//
// Tiles come to shared memory as they lie in the file: 512 bytes of masks, then word i (values 2 i and 2 i + 1) of every lane
// for the rows g, then the same for the rows g + 8. Lane 4 * g + t owns block t (64 columns) of its two rows; its words stand
// in its own bank, so reads never conflict and no lane asks another.
//
// For the columns (c, c + 1) let a be the number of values up to and including column c. They are the values a - 1 and a:
// word a / 2 holds both if a is odd; else it holds the second, and the first is in the word that the pair before these
// columns took. So one read and one funnel shift give both, and two mask bits, spread by a byte-permute, blank the dead ones.
// Counts are kept in sixteenths of a funnel shift: bits of the mask at 0x10 of each byte, summed by one dp4a.
//
// KEEP is the number of values a block.

#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"

constexpr int kWarp = 32;
constexpr int kRows = 16;                        // of a tile
constexpr int kColumns = 256;                    // of a tile
constexpr int kBlock = 64;                       // columns of one mask
constexpr int kSteps = kBlock / 4;               // of four columns of each block
constexpr int kMaskBytes = kWarp * 16;           // both rows' masks of every lane
constexpr int kRowBytes = kWarp * 4;             // a word of every lane
constexpr int kTileBytes = kMaskBytes + (KEEP + 1) / 2 * 2 * kRowBytes;
constexpr int kOverrun = 2 * kRowBytes;          // a block's last pair may read one word past its values
constexpr Word kOnes = 0x10101010u;

// Waits until no more than `open` groups of this lane are on their way; a warp must meet before it reads others' copies.
template <int open>
__device__ __forceinline__ void wait_for_tiles() {
    cp_async_wait_group<open>();
    __syncwarp();
}

// Asks for a tile: the lanes of a warp together.
template <int at = 0>
__device__ __forceinline__ void copy_tile(Word to, const unsigned char* from, int lane) {
    if (at + kWarp * 16 <= kTileBytes || lane * 16 < kTileBytes - at)
        cp_async_16_at<at>(to + lane * 16, from + lane * 16);
    if constexpr (at + kWarp * 16 < kTileBytes) copy_tile<at + kWarp * 16>(to, from, lane);
}

// Walks over one row of a lane's block, four columns a step.
template <int offset>
struct Walk {
    Word low, high;    // the mask's halves
    Word base;         // shared address of the lane's first word, less 128
    Word count = 16;   // 16 + 16 for each value up to the last column counted
    Word last = 0;     // the word read last

    // The weights in the columns 4 * step to 4 * step + 3, two in each word; steps are taken in order.
    template <int step>
    __device__ __forceinline__ uint2 take() {
        constexpr int by = step % 8;
        const Word half = step < 8 ? low : high;
        const Word bits = half << by;
        const Word after = step == 7 ? high : step == 15 ? low : half << (by + 1) % 8;
        const Word ones = (by < 3 ? half >> (3 - by) % 8 : half << (by + 5) % 8) & kOnes;
        // Byte 0 is the column before these four; at step 0 it is column 63's bit and does not count yet.
        const Word middle = __dp4a(ones, step ? 0x00000101u : 0x00000100u, count);
        count = __dp4a(ones, step ? 0x01010101u : 0x01010100u, count);
        const Word first = ld_shared<offset>(middle * 8 + base & ~128u);
        const Word second = ld_shared<offset>(count * 8 + base & ~128u);
        const uint2 found{__funnelshift_l(last, first, middle) & prmt(bits, bits, 0xaa99),
                          __funnelshift_l(first, second, count) & prmt(bits, after, 0xccbb)};
        last = second;
        return found;
    }
};

// A lane's two rows of a tile that lies at a shared address, a multiple of 256.
struct Rows {
    Walk<0> upper;
    Walk<kRowBytes> lower;

    __device__ __forceinline__ Rows(Word tile, int lane) {
        const uint4 masks = ld_shared_v4(tile + lane * 16);
        upper.low = masks.x, upper.high = masks.y;
        lower.low = masks.z, lower.high = masks.w;
        upper.base = lower.base = tile + kMaskBytes + lane * 4 - 128;
    }
};
