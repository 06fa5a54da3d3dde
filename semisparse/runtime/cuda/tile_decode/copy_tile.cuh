// Copies of weight tiles to shared memory with cp.async, each by all lanes of a warp.

#pragma once

#include "expand_gemm/tile_shape.cuh"
#include "ptx/cp_async.cuh"

// Copies a tile of `size` bytes, a multiple of 16.
template <int size, int at = 0>
__device__ __forceinline__ void copy_tile(Word to, const unsigned char* from, int lane) {
    if (at + kWarpSize * 16 <= size || lane * 16 < size - at) cp_async_16_at<at>(to + lane * 16, from + lane * 16);
    if constexpr (at + kWarpSize * 16 < size) copy_tile<size, at + kWarpSize * 16>(to, from, lane);
}

// Copies the first `bytes` of a tile, at most `size`; both are multiples of 16.
template <int size, int at = 0>
__device__ __forceinline__ void copy_part(Word to, const unsigned char* from, int bytes, int lane) {
    if (at + lane * 16 < bytes) cp_async_16_at<at>(to + lane * 16, from + lane * 16);
    if constexpr (at + kWarpSize * 16 < size) copy_part<size, at + kWarpSize * 16>(to, from, bytes, lane);
}

// Waits for all but this lane's `pending` most recent cp.async groups, then for the other lanes' copies.
template <int pending>
__device__ __forceinline__ void wait_tiles() {
    cp_async_wait_group<pending>();
    __syncwarp();
}
