// A tile of gemm_wgmma.cu, 16 rows by 256 columns, in shared memory, and how a lane expands its weights from it.
//
// Lane 4 r + g has group g of rows r and r + 8 of each chunk, as in gemm.cu, and no other lane's weights: 64 columns of each
// row per tile. A tile has several chunks of short groups, one of groups of 64, or half of one of groups of 128. A slice is
// what a lane reads of a group at once, up to 16 bytes of codes.
//
//   tile      | codes, kCodesBytes | scale, kScaleBytes | zero, kZeroBytes |
//   header    | mask of rows 0 to 7 | of rows 8 to 15 | groups before the chunk | and after it |   one per chunk
//
// Codes, scales and zero points are copied as they are in global memory, from the multiple of 16 bytes before the tile's first
// group on. A chunk of groups of 128 columns is copied once, and serves the two iterations of its halves (kParts).
//
// Macros: BITS (2, 3, 4 or 8), GROUP_SIZE (8 to 128).

#pragma once

#include "expand_gemm/tile_shape.cuh"
#include "gemm_dequantise.cuh"
#include "ptx/shared.cuh"

constexpr int kGroupBytes = GROUP_SIZE * BITS / 8;              // bytes of a group's codes
constexpr int kLaneColumns = kTileColumns / 4;                  // per tile, of each of a lane's two rows
constexpr int kGroupColumns = least(GROUP_SIZE, kLaneColumns);  // of a group in an iteration
constexpr int kChunks = kLaneColumns / kGroupColumns;           // per tile
constexpr int kParts = GROUP_SIZE / kGroupColumns;              // iterations that share a copied tile
constexpr int kMaxGroups = 64 * kChunks;

__device__ __forceinline__ constexpr int round_up_16(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int kCodesBytes = round_up_16(kMaxGroups * kGroupBytes) + 16;
constexpr int kScaleBytes = kMaxGroups * 2 + 16;
constexpr int kZeroBytes = kMaxGroups + 16;
constexpr int kGqsTileBytes = kCodesBytes + kScaleBytes + kZeroBytes;

constexpr int kHeaderBytes = 16;
constexpr int kSliceColumns = least(kGroupColumns, BITS == 8 ? 16 : 32);
constexpr int kStepsPerSlice = kSliceColumns / 4;  // a k-step of wgmma has 4 columns of each lane
constexpr int kSlicesPerGroup = kGroupColumns / kSliceColumns;
constexpr int kTileSlices = kLaneColumns / kSliceColumns;
constexpr int kSliceBytes = kSliceColumns * BITS / 8;
constexpr int kSliceWords = (kSliceBytes + 3) / 4;

// A slice of the lane's two groups; if a group is dropped, scale 0 and any codes.
struct Slice {
    Word codes[2][kSliceWords];
    Word scale[2], zero[2];
};

// Reads a slice's codes. Their address is a multiple of the largest power of two that divides kSliceBytes.
template <int words>
__device__ __forceinline__ void read_codes(Word (&codes)[words], Word from) {
    if constexpr (kSliceBytes == 4 * words && words % 2 == 0) {
        ld_shared_ordered(codes, from);
    } else if constexpr (kSliceBytes % 4 == 0) {
#pragma unroll
        for (int i = 0; i < words; ++i) codes[i] = ld_shared_ordered(from + 4 * i);
    } else if constexpr (kSliceBytes % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kSliceBytes / 2; ++i) {
            const Word half = ld_shared_ordered_u16(from + 2 * i);
            codes[i / 2] = i % 2 ? codes[i / 2] | half << 16 : half;
        }
    } else {
        codes[0] = ld_shared_ordered_u8(from) | ld_shared_ordered_u8(from + 1) << 8 | ld_shared_ordered_u8(from + 2) << 16;
    }
}

// Expands a tile, four columns of both rows per k-step.
struct TileExpander {
    Word tile, headers;   // addresses in shared memory
    Word bit, part;       // the lane's bit of a mask; which of the kParts iterations of the tile
    Word code_mask;       // of a pair of codes
    Word first;           // the tile's first group, counted over the weight
    Word group[2];        // the lane's two groups of the chunk that is being read, counted over the weight
    bool kept[2];
    Slice slices[2];      // one is expanded while the other is read

    __device__ __forceinline__ TileExpander(Word tile, Word headers, Word bit, int part, Word code_mask)
        : tile(tile), headers(headers), bit(bit), part(part), code_mask(code_mask), first(ld_shared_ordered(headers + 8)) {
        read<0>();
    }

    template <int chunk>
    __device__ __forceinline__ void find_groups() {
        Word header[4];
        ld_shared_ordered(header, headers + chunk * kHeaderBytes);
        const Word below = bit - 1;
        group[0] = header[2] + __popc(header[0] & below);
        group[1] = header[2] + __popc(header[0]) + __popc(header[1] & below);
        kept[0] = header[0] & bit, kept[1] = header[1] & bit;
    }

    // Address of a slice's codes. Offsets may wrap around 2^32: their difference does not.
    __device__ __forceinline__ Word codes_at(Word index, int slice) const {
        const Word begin = first * kGroupBytes;
        return tile + (begin & 15) + index * kGroupBytes - begin + (part * kSlicesPerGroup + slice) * kSliceBytes;
    }

    template <int number>
    __device__ __forceinline__ void read() {
        if constexpr (number % kSlicesPerGroup == 0) find_groups<number / kSlicesPerGroup>();
        Slice& slice = slices[number % 2];
        const Word scales = tile + kCodesBytes + (first * 2 & 15) - first * 2;
        const Word zeros = tile + kCodesBytes + kScaleBytes + (first & 15) - first;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            read_codes(slice.codes[row], codes_at(group[row], number % kSlicesPerGroup));
            const Word scale = ld_shared_ordered_u16(scales + group[row] * 2);
            slice.scale[row] = kept[row] ? scale : 0;
            slice.zero[row] = ld_shared_ordered_u8(zeros + group[row]);
        }
    }

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int number = step / kStepsPerSlice, unit = step % kStepsPerSlice / 2, pair = step % 2 * 2;
        const Slice& slice = slices[number % 2];
        if constexpr (step % kStepsPerSlice == 0 && number + 1 < kTileSlices) read<number + 1>();
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const ScaleZero group = prepare(slice.scale[row], slice.zero[row], kElement);
            fragment[row] = dequantise_pair(slice.codes[row], unit, pair, group, code_mask, kElement);
            fragment[2 + row] = dequantise_pair(slice.codes[row], unit, pair + 1, group, code_mask, kElement);
        }
    }
};
