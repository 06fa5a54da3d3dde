// w[n, pitch] from a bitmask weight in the layout `tiles`, for products that need the dense weight. Dead weights, and columns
// from K on, come out as zeros. A warp takes one tile at a time, the next ones on their way; it collects the dense tile in
// shared memory, so that a row leaves in 512 consecutive bytes.
//
// Compiled for KEEP (values a block), WARPS (of a block) and STAGES.

#include "tiled.cuh"

constexpr int kBlockPitch = kBlock * 2 + 16;      // bytes of 64 columns, and a gap that keeps lanes out of one another's banks
constexpr int kRowPitch = 4 * kBlockPitch;
constexpr int kDenseBytes = kRows * kRowPitch;    // of shared memory for a warp's dense tile

template <int step = 0>
__device__ __forceinline__ void unpack(Rows& rows, Word place) {
    const uint2 a = rows.upper.take<step>(), b = rows.lower.take<step>();
    const uint2 c = rows.upper.take<step + 1>(), d = rows.lower.take<step + 1>();
    st_shared_v4(place + 8 * step, uint4{a.x, a.y, c.x, c.y});
    st_shared_v4(place + kRows / 2 * kRowPitch + 8 * step, uint4{b.x, b.y, d.x, d.y});
    if constexpr (step + 2 < kSteps) unpack<step + 2>(rows, place);
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarp) semisparse_bitmask_tiled_unpack(
    const unsigned char* __restrict__ tiles,       // [row tiles, column_tiles, kTileBytes]
    unsigned short* __restrict__ w,                // [n, pitch]; a row is a multiple of 8 values long
    int n, int pitch, int count, int column_tiles  // count: of all tiles
) {
    extern __shared__ __align__(256) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int stride = gridDim.x * WARPS;
    const Word base = smem_address(shared);
    const Word dense = base + WARPS * STAGES * kTileBytes + kOverrun + warp * kDenseBytes;
    const int first = blockIdx.x * WARPS + warp;
    auto tile_at = [&](int index) { return tiles + static_cast<long long>(index) * kTileBytes; };
    const Word ring = base + warp * STAGES * kTileBytes;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        if (first + i * stride < count) copy_tile(ring + i * kTileBytes, tile_at(first + i * stride), lane);
        cp_async_commit_group();
    }
    int stage = 0;
#pragma unroll 1
    for (int index = first; index < count; index += stride) {
        const Word place = ring + stage * kTileBytes;
        wait_for_tiles<STAGES - 1>();
        Rows rows(place, lane);
        unpack(rows, dense + lane / 4 * kRowPitch + lane % 4 * kBlockPitch);
        __syncwarp();
        if (index + STAGES * stride < count) copy_tile(place, tile_at(index + STAGES * stride), lane);
        cp_async_commit_group();
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        const int row = index / column_tiles * kRows;
        const int column = index % column_tiles * kColumns + lane * 8;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const uint4 values = ld_shared_v4(dense + i * kRowPitch + lane / 8 * kBlockPitch + lane % 8 * 16);
            if (row + i < n && column < pitch)
                *reinterpret_cast<uint4*>(w + static_cast<long long>(row + i) * pitch + column) = values;
        }
        __syncwarp();
    }
}
