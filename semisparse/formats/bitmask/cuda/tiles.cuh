// A bitmask weight in the layout `tiles`, for decode.cuh and unpack.cuh: where its tiles are, and how a warp copies one.

#pragma once

#include "tile_decode/copy_tile.cuh"
#include "tile.cuh"

struct Tiles {
    static constexpr int kTileBytes = ::kTileBytes;
    static constexpr bool kFinds = false;
    using Expander = TileExpander;

    const unsigned char* tiles;  // [row_tiles, column_tiles, kTileBytes]

    __device__ __forceinline__ void copy(Word to, long long index, bool exists, int lane) const {
        if (exists) copy_tile<kTileBytes>(to, tiles + index * kTileBytes, lane);
    }
};
