// Mask tiles, which differ in size, for decode.cuh and unpack.cuh: where they are, and how a warp copies one.

#pragma once

#include "tile_decode/copy_tile.cuh"
#include "tile.cuh"

struct Tiles {
    static constexpr int kTileBytes = ::kTileBytes;
    static constexpr bool kFinds = true;
    using Expander = TileExpander;

    const unsigned char* tiles;
    const int* starts;          // [row_tiles * column_tiles + 1], in units of kUnitBytes
    int begin = 0, end = 0;     // of the tile found last, in units; none past the last row tile

    __device__ __forceinline__ void find(long long index) { begin = starts[index], end = starts[index + 1]; }
    __device__ __forceinline__ void find_none() { begin = end = 0; }

    __device__ __forceinline__ void copy(Word to, long long, bool, int lane) const {
        copy_part<kTileBytes>(to, tiles + static_cast<long long>(begin) * kUnitBytes, (end - begin) * kUnitBytes, lane);
    }
};
