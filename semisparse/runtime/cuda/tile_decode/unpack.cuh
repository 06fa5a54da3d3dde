// w[n, pitch] from a weight in tiles of 16 rows by 256 columns, for GEMMs that take the dense weight. Weights that are not stored,
// and columns from K on, are zeros.
//
// Grid: 1-D, at most as many CTAs as are resident. CTA: WARPS warps; each takes one tile at a time and strides over all tiles.
// Shared memory: WARPS rings of STAGES tiles (cp.async), and per warp a dense tile: 16 rows of four blocks of 144 bytes. The warp
// expands a tile into it, so that a row is written in 512 consecutive bytes.
// Bound by memory: at 32:64 from 8960 x 1536 up it takes 1.12 to 1.21 times its bytes over bandwidth (14.9 us at 4096 x 4096).
//
// A format defines a type Tiles as for decode.cuh; its Expander has two rows, `upper` and `lower`, whose expand<step>() returns four
// columns.
//
// Macros: SCALAR, WARPS and STAGES.

#pragma once

#include "ptx/shared.cuh"
#include "tile_decode/copy_tile.cuh"

constexpr int kBlockPitch = kBlockColumns * 2 + 16;  // bytes per block of a dense row: the 16 avoid bank conflicts
constexpr int kRowPitch = 4 * kBlockPitch;
constexpr int kDenseBytes = kTileRows * kRowPitch;   // per warp

// Expands a lane's rows of a tile, eight columns per store.
template <int step = 0, typename Expander>
__device__ __forceinline__ void expand_tile(Expander& tile, Word dense) {
    const uint2 a = tile.upper.template expand<step>(), b = tile.lower.template expand<step>();
    const uint2 c = tile.upper.template expand<step + 1>(), d = tile.lower.template expand<step + 1>();
    st_shared_v4(dense + 8 * step, uint4{a.x, a.y, c.x, c.y});
    st_shared_v4(dense + kTileRows / 2 * kRowPitch + 8 * step, uint4{b.x, b.y, d.x, d.y});
    if constexpr (step + 2 < kSteps) expand_tile<step + 2>(tile, dense);
}

// Begins to load the offset of tile `index`, if it exists and offsets have to be loaded.
template <typename Tiles>
__device__ __forceinline__ void find_tile(Tiles& tiles, int index, int tile_count) {
    if constexpr (Tiles::kFinds) {
        if (index < tile_count) tiles.find(index);
        else tiles.find_none();
    }
}

template <typename Tiles>
__device__ __forceinline__ void unpack(Tiles tiles, unsigned short* w, int n, int pitch, int tile_count, int column_tiles,
                                       unsigned char* shared) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int stride = gridDim.x * WARPS;
    const Word base = smem_address(shared);
    const Word dense = base + WARPS * STAGES * Tiles::kTileBytes + warp * kDenseBytes;
    const int first = blockIdx.x * WARPS + warp;
    const Word ring = base + warp * STAGES * Tiles::kTileBytes;
    Tiles found[STAGES];  // all offsets are requested before the first copy waits for its own
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        found[i] = tiles;
        find_tile(found[i], first + i * stride, tile_count);
    }
    find_tile(tiles, first + STAGES * stride, tile_count);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        const int index = first + i * stride;
        found[i].copy(ring + i * Tiles::kTileBytes, index, index < tile_count, lane);
        cp_async_commit_group();
    }
    int stage = 0;
#pragma unroll 1
    for (int index = first; index < tile_count; index += stride) {
        const Word source = ring + stage * Tiles::kTileBytes;
        wait_tiles<STAGES - 1>();
        typename Tiles::Expander tile(source, lane);
        expand_tile(tile, dense + lane / 4 * kRowPitch + lane % 4 * kBlockPitch);
        __syncwarp();
        const int next = index + STAGES * stride;
        tiles.copy(source, next, next < tile_count, lane);
        cp_async_commit_group();
        find_tile(tiles, next + stride, tile_count);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        const int row = index / column_tiles * kTileRows;
        const int column = index % column_tiles * kTileColumns + lane * 8;
#pragma unroll
        for (int i = 0; i < kTileRows; ++i) {
            const uint4 values = ld_shared_v4(dense + i * kRowPitch + lane / 8 * kBlockPitch + lane % 8 * 16);
            if (row + i < n && column < pitch)
                *reinterpret_cast<uint4*>(w + static_cast<long long>(row + i) * pitch + column) = values;
        }
        __syncwarp();
    }
}
