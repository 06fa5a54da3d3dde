// Copies a warp's k-tiles of the weight to its stages in shared memory by cp.async, and reads them there (full_tile.cuh).

#pragma once

#include "full_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"
#include "warp.cuh"

struct FullWeight {
    const char* codes;  // [rows * groups, kGroupBytes], in the order of the chunks
    const char* scale;  // [rows * groups], an Element each
    const char* zero;   // [rows * groups]
    Word groups;        // per row
};

// Where a k-tile is in the weight's chunks.
struct ChunkPart {
    Word chunk, first;  // the chunk, or the first of several; its first group in a row of the chunk
    Word width;         // groups of a row of the chunk

    __device__ __forceinline__ ChunkPart(Word k_tile, Word groups)
        : chunk(k_tile / kTilesPerChunk * kChunksPerTile), first(k_tile % kTilesPerChunk * kGroupsPerTile),
          width(kTilesPerChunk > 1 ? min(Word{kChunkGroups}, groups - chunk * kChunkGroups) : kChunkGroups) {}
};

constexpr Word kChunkRowGroups = kRows * kChunkGroups;
constexpr int kCodeCopies = kRows * kRowCopies;                    // of 16 bytes, per k-tile of a row tile
constexpr int kGroupCopies = kRows * (kScaleWords + kZeroWords);   // of 4 bytes
constexpr int kCodeRounds = (kCodeCopies + 31) / 32, kGroupRounds = (kGroupCopies + 31) / 32;  // a copy per lane

// Copies the k-tiles of a warp. In each round a lane copies the same part of every k-tile; its address depends on the chunk's width.
struct WeightCopy {
    const char* codes;
    Word code_row[kCodeRounds], code_column[kCodeRounds];  // row; byte offset of the column, a second chunk's after the first's
    const char* words[kGroupRounds];   // scales or zero points
    Word word_row[kGroupRounds], word_column[kGroupRounds], element[kGroupRounds];  // in bytes: column, and size of a number
    Word to_codes, to_words;           // addresses in stage 0
    Word before[ROW_TILES];            // groups of the weight before each row tile

    __device__ __forceinline__ WeightCopy(const FullWeight& weight, const Word (&row_tiles)[ROW_TILES], Word to, int lane)
        : codes(weight.codes), to_codes(keep_in_register(to + lane * 16)), to_words(keep_in_register(to + kScaleAt + lane * 4)) {
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) before[i] = keep_in_register(kRows * weight.groups * row_tiles[i]);
#pragma unroll
        for (int round = 0; round < kCodeRounds; ++round) {
            const Word copy = round * 32 + lane, column = copy % kRowCopies;
            code_row[round] = keep_in_register(copy / kRowCopies);
            code_column[round] =
                keep_in_register(column / kCopiesPerChunk * (kChunkRowGroups * kGroupBytes) + column % kCopiesPerChunk * 16);
        }
#pragma unroll
        for (int round = 0; round < kGroupRounds; ++round) {
            const Word index = round * 32 + lane;
            const bool is_scale = index < kRows * kScaleWords;
            const Word per_row = is_scale ? kScaleWords : kZeroWords, at = is_scale ? index : index - kRows * kScaleWords;
            const Word size = is_scale ? 2 : 1, word = at % per_row, per_chunk = per_row / kChunksPerTile;
            words[round] = keep_in_register(is_scale ? weight.scale : weight.zero);
            word_row[round] = keep_in_register(at / per_row);
            word_column[round] = keep_in_register(word / per_chunk * kChunkRowGroups * size + word % per_chunk * 4);
            element[round] = keep_in_register(size);
        }
    }

    // Copies a k-tile of all row tiles to the stage at `stage` bytes.
    __device__ __forceinline__ void copy(Word stage, const ChunkPart& at) const {
        const Word code_offset = at.chunk * (kChunkRowGroups * kGroupBytes) + at.first * kGroupBytes;
        const Word pitch = at.width * kGroupBytes;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            const char* base = mad_wide(before[i], kGroupBytes, codes);
#pragma unroll
            for (int round = 0; round < kCodeRounds; ++round) {
                if (kCodeCopies % 32 && round * 32 + threadIdx.x % 32 >= kCodeCopies) continue;
                const Word offset = mad_lo(code_row[round], pitch, code_column[round] + code_offset);
                cp_async_16(to_codes + stage + i * kRowTileBytes + round * 512, mad_wide(offset, 1, base));
            }
#pragma unroll
            for (int round = 0; round < kGroupRounds; ++round) {
                if (kGroupCopies % 32 && round * 32 + threadIdx.x % 32 >= kGroupCopies) continue;
                const Word group = mad_lo(word_row[round], at.width, at.first);
                const Word offset = (group * element[round] & ~3u) + word_column[round] + at.chunk * kChunkRowGroups * element[round];
                cp_async<4>(to_words + stage + i * kRowTileBytes + round * 128,
                            mad_wide(offset, 1, mad_wide(before[i], element[round], words[round])));
            }
        }
    }
};

// Reads a warp's k-tile of a row tile.
struct WeightRead {
    Word codes, scales, zeros;  // addresses of the lane's codes, scales and zero points in stage 0
    Word row, column;           // the lane's first row; which quarter of a segment's columns it has

    __device__ __forceinline__ WeightRead(Word tiles, int lane)
        : codes(keep_in_register(tiles + lane / 4 * kRowBytes + lane % 4 * (4 * kPieceWords))),
          scales(keep_in_register(tiles + kScaleAt + lane / 4 * (4 * kScaleWords))),
          zeros(keep_in_register(tiles + kZeroAt + lane / 4 * (4 * kZeroWords))), row(keep_in_register(lane / 4)),
          column(keep_in_register(lane % 4)) {}
};

// Index of the k-tile's first group among the scales, or zero points, that share its word; 0 where a row's fill whole words.
__device__ __forceinline__ Word skew_of(const ChunkPart& at, Word row) {
    return kGroupsPerTile <= 2 ? mad_lo(row, at.width, at.first) & 3 : 0;
}

// Scale and zero point of group `group` of row 8 `half` + lane / 4, as they are stored.
struct StoredGroup {
    Word scale, zero;

    __device__ __forceinline__ StoredGroup(const WeightRead& read, Word stage, int row_tile, int half, Word skew, Word group) {
        const Word at = stage + row_tile * kRowTileBytes;
        scale = ld_shared_ordered_u16(read.scales + at + 2 * ((skew & 1) + group) + half * 8 * (4 * kScaleWords));
        zero = ld_shared_ordered_u8(read.zeros + at + skew + group + half * 8 * (4 * kZeroWords));
    }
};

// A lane's codes of a segment, of its two rows.
using Codes = Word[2][kPieceWords];

template <int words>
__device__ __forceinline__ void read_words(Word (&to)[words], Word from) {
    if constexpr (words == 4 || words == 2) {
        ld_shared_ordered(to, from);
    } else if constexpr (words == 8) {
        Word low[4], high[4];
        ld_shared_ordered(low, from);
        ld_shared_ordered(high, from + 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = low[i], to[4 + i] = high[i];
    } else {
#pragma unroll
        for (int i = 0; i < words; ++i) to[i] = ld_shared_ordered(from + 4 * i);
    }
}

__device__ __forceinline__ void read_codes(Codes& codes, const WeightRead& read, Word stage, int row_tile, int segment) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int offset = row_tile * kRowTileBytes + half * 8 * kRowBytes + segment * (16 * kPieceWords);
        read_words(codes[half], read.codes + stage + offset);
    }
}
