// Sizes of gemm.cu: what a warp multiplies in one iteration (a k-tile), and in which pieces it loads the weight (slices).
//
// A k-tile is 4 K_TILE columns: several chunks if groups are shorter than K_TILE columns, or else K_TILE columns of each of a
// chunk's four groups. Lane 4 r + g has group g of rows r and r + 8 of each row tile, and no other lane's weights.
//
//   groups of 16, K_TILE = 64                        groups of 128, K_TILE = 64
//   | chunk 0       | chunk 1 | chunk 2 | chunk 3 |  | chunk 0                                          |
//   | g0 g1 g2 g3   | ...                         |  | g0: tile 0, tile 1 | g1: tile 0, tile 1 | g2 ...
//
// A slice is kSlice columns of a lane's group, which it loads at once. A unit is 8 columns of a slice, four for each of two
// mma.m16n8k16: of each four, the lane's columns 0, 1, 2, 3 take the places of the instruction's columns 2 g, 2 g + 1, 2 g + 8,
// 2 g + 9. Columns may have any order in the fragments if A and B have the same.

#pragma once

#include "element.cuh"
#include "ptx/word.cuh"

constexpr int kRows = 16;    // per row tile
constexpr int kGroups = 4;   // per row of a chunk
constexpr int kUnit = 8;     // columns
constexpr int kWarps = WARPS_N * WARPS_K;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroupBytes = GROUP_SIZE * BITS / 8;  // bytes of a group's codes

constexpr int kChunksPerTile = K_TILE > GROUP_SIZE ? K_TILE / GROUP_SIZE : 1;
constexpr int kTilesPerChunk = GROUP_SIZE > K_TILE ? GROUP_SIZE / K_TILE : 1;

constexpr int kSlice = least(least(GROUP_SIZE, K_TILE / 2), BITS == 8 ? 8 : 32);  // columns
constexpr int kSlices = K_TILE / kSlice;                                // per k-tile
constexpr int kSlicesPerChunk = least(GROUP_SIZE, K_TILE) / kSlice;     // per chunk in a k-tile
constexpr int kUnitsPerSlice = kSlice / kUnit;
constexpr int kSliceBytes = kSlice * BITS / 8;
constexpr int kSliceWords = (kSliceBytes + 3) / 4;
static_assert(kSlices % PREFETCH == 0, "registers are indexed at compile time");

// The first column of a k-tile's group 0.
__device__ __forceinline__ int column_of(int tile) {
    return tile / kTilesPerChunk * (kGroups * GROUP_SIZE * kChunksPerTile) + tile % kTilesPerChunk * K_TILE;
}

struct Slice {  // of the lane's two groups of a row tile; if a group is dropped, scale 0 and any codes
    Word codes[2][kSliceWords];
    Word scale[2], zero[2];
};
