// w[n, pitch] from a bitmask weight in the layout `tiles`: a warp a tile, for products that need the dense weight. Dead
// weights, and columns from K on, come out as zeros.
//
// Compiled for KEEP (values a block) and WARPS (of a block).

#include "tiled.cuh"

struct Target {
    unsigned short* w;  // [n, pitch]
    int n, pitch;       // a row is a multiple of 8 values long

    // Stores 8 columns.
    __device__ __forceinline__ void store(int row, int column, uint4 values) const {
        if (row < n && column < pitch) *reinterpret_cast<uint4*>(w + static_cast<long long>(row) * pitch + column) = values;
    }
};

template <int step = 0>
__device__ __forceinline__ void unpack(Rows& rows, const Target& target, int row, int column) {
    const uint2 a = rows.upper.take<step>(), b = rows.lower.take<step>();
    const uint2 c = rows.upper.take<step + 1>(), d = rows.lower.take<step + 1>();
    target.store(row, column + 4 * step, uint4{a.x, a.y, c.x, c.y});
    target.store(row + kRows / 2, column + 4 * step, uint4{b.x, b.y, d.x, d.y});
    if constexpr (step + 2 < kSteps) unpack<step + 2>(rows, target, row, column);
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarp) semisparse_bitmask_tiled_unpack(
    const Word* __restrict__ tiles,        // [row tiles, column_tiles, kTileWords]
    unsigned short* __restrict__ w,        // [n, pitch]
    int n, int pitch, int count, int column_tiles  // count: of all tiles
) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int index = blockIdx.x * WARPS + warp;
    if (index >= count) return;
    Tile tile;
    load(tile, tiles + static_cast<long long>(index) * kTileWords, lane);
    Rows rows(tile, shared_address(shared) + warp * kStageBytes + lane * 4);
    const int row = index / column_tiles * kRows + lane / 4;
    const int column = index % column_tiles * kColumns + lane % 4 * kBlock;
    unpack(rows, Target{w, n, pitch}, row, column);
}
