// A tile of the layout `tiles` in shared memory: how it is copied there. How a lane expands its weights depends on what it holds:
// values (tile_values.cuh), or codes of 8 (tile_bytes.cuh) or 4 bits (tile_nibbles.cuh).
//
// Compiled with KEEP (values or codes per block) and BITS (per code; 0 or undefined for values).

#pragma once

#include "expand_gemm/tile_shape.cuh"
#include "ptx/cp_async.cuh"

constexpr int kBlockColumns = 64;                // of one mask; a k-step has 4 columns of each of the 4 blocks
constexpr int kWordRowBytes = kWarpSize * 4;     // one word per lane

#if BITS == 8
#include "tile_bytes.cuh"
#elif BITS == 4
#include "tile_nibbles.cuh"
#else
#include "tile_values.cuh"
#endif

// Waits for all but this lane's `pending` most recent cp.async groups, then for the other lanes' copies.
template <int pending>
__device__ __forceinline__ void wait_tiles() {
    cp_async_wait_group<pending>();
    __syncwarp();
}

// Copies a tile to shared memory with cp.async, by all lanes of a warp.
template <int at = 0>
__device__ __forceinline__ void copy_tile(Word to, const unsigned char* from, int lane) {
    if (at + kWarpSize * 16 <= kTileBytes || lane * 16 < kTileBytes - at)
        cp_async_16_at<at>(to + lane * 16, from + lane * 16);
    if constexpr (at + kWarpSize * 16 < kTileBytes) copy_tile<at + kWarpSize * 16>(to, from, lane);
}
