// A tile of 8-bit codes in the layout `tiles` (README.md has the figure) in shared memory, and how a lane expands its weights.
//
// A tile is 16 rows by 256 columns: word i (codes 4 i to 4 i + 3) of every lane for its row g, then the same for its row g + 8;
// behind all words 512 bytes of masks, then 128 of scales. Lane 4 g + t owns block t (64 columns) of these two rows. Past its last
// code a lane reads one word more, of masks, and selects no code of it.
//
// Four columns at a time: their mask bits are one bit of each of four nibbles. A multiplication turns these bits into the
// selector of a prmt, which picks each column's code from the next four stored ones, or the code of zero: the selector's nibble
// j is the number of bits set before bit j, and 4 more where bit j is 0. One read and one funnel shift give the next four codes.
// Columns, codes and bits are in the order 0, 2, 1, 3.
//
// Compiled with SCALAR and KEEP (codes per block).

#pragma once

#include "dequantise.cuh"
#include "ptx/shared.cuh"

constexpr int kMaskBytes = kWarpSize * 16;                 // per tile: both rows' masks of every lane
constexpr int kWordStride = 2 * kWordRowBytes;             // from a word of a row to its next
constexpr int kMaskStart = (KEEP + 3) / 4 * kWordStride;   // behind the codes
constexpr int kScaleStart = kMaskStart + kMaskBytes;
constexpr int kTileBytes = kScaleStart + kWordRowBytes;
constexpr Word kZeroCodes = 0x80808080u;

// Expands one row of a lane's block, four columns per step.
template <int offset>
struct RowExpander {
    Word low, high;      // the mask's halves
    Word base;           // shared-memory address of the lane's first word
    Word at;             // 8 times the number of codes before the next columns
    Word previous;       // the word that holds the next code
    Pair scale;
    Word high_bytes;     // in registers, since LOP3 takes one constant
    Word sign_offset;

    __device__ __forceinline__ void begin(Word low_mask, Word high_mask, Word stream, Pair of_row) {
        low = low_mask, high = high_mask, base = stream, at = 0;
        previous = ld_shared<offset>(base);
        scale = of_row, high_bytes = in_register(kHighBytes, stream), sign_offset = in_register(0x43804380u, stream);
    }

    // In bfloat16: 128 + the low 7 bits of a code, less 128 where its highest bit is 1 and 256 where it is 0, times the scale.
    __device__ __forceinline__ Word weights_of(Word codes) const {
        return scaled(codes & 0x007f007fu | high_bytes, codes & 0x00800080u ^ sign_offset, scale);
    }

    // The weights of columns 4 * step to 4 * step + 3, two per word; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ uint2 expand() {
        constexpr int place = step % 4, shift = step / 4 % 2 * 16 + (place == 3 ? 3 : 0), left = place == 3 ? 0 : place;
        const Word stored = (step < 8 ? low : high) >> shift & 0x1111u << left;
        const Word selector = mad_lo(stored, 0x110cu >> left, 0x4444u);
        const Word begin = at;
        at = mad_lo(__popc(stored), 8, at);
        const Word word = ld_shared<offset>(mad_lo(at & ~31u, kWordStride / 32, base));
        const Word next = __funnelshift_r(previous, word, begin);
        previous = word;
        const Word codes = prmt(next, kZeroCodes, selector);
        if constexpr (!kHalf) return {weights_of(codes), weights_of(codes >> 8)};
        constexpr Word kZero = kHighBytes + 0x00800080u;
        return {scaled(codes & 0x00ff00ffu | high_bytes, kZero, scale),
                scaled(prmt(codes, high_bytes, 0x5351), kZero, scale)};
    }
};

// Expands a lane's rows g and g + 8 of a tile at a shared-memory address.
struct TileExpander {
    RowExpander<0> upper;
    RowExpander<kWordRowBytes> lower;

    __device__ __forceinline__ TileExpander(Word tile, int lane) {
        const uint4 masks = ld_shared_v4(tile + kMaskStart + lane * 16);
        const Word scales = ld_shared(tile + kScaleStart + lane * 4), stream = tile + lane * 4;
        upper.begin(masks.x, masks.y, stream, scale_of(scales, 0));
        lower.begin(masks.z, masks.w, stream, scale_of(scales, 1));
    }

    // The fragment of k-step `step`; steps must be taken in order.
    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        const uint2 a = upper.expand<step>(), b = lower.expand<step>();
        fragment[0] = a.x, fragment[1] = b.x, fragment[2] = a.y, fragment[3] = b.y;
    }
};
