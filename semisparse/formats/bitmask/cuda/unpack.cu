// w[n, pitch] from a bitmask weight in the layout `tiles`, for GEMMs that take the dense weight. Weights that are not stored,
// and columns from K on, are zeros.
//
// Grid: 1-D, at most as many CTAs as are resident. CTA: WARPS warps; each takes one tile at a time and strides over all tiles.
// Shared memory: WARPS rings of STAGES tiles (cp.async), and per warp a dense tile: 16 rows of four blocks of 144 bytes. The warp
// expands a tile into it, so that a row is written in 512 consecutive bytes.
// Bound by memory: from 8960 x 1536 up it takes 1.12 to 1.21 times its bytes over bandwidth (14.9 us at 4096 x 4096).
//
// Macros: SCALAR, KEEP (values or codes per block), BITS (per code; 0 for values), WARPS and STAGES.

#include "tile_decode/copy_tile.cuh"
#include "tile.cuh"

constexpr int kBlockPitch = kBlockColumns * 2 + 16;  // bytes per block of a dense row: the 16 avoid bank conflicts
constexpr int kRowPitch = 4 * kBlockPitch;
constexpr int kDenseBytes = kTileRows * kRowPitch;   // per warp

// Expands a lane's rows of a tile, eight columns per store.
template <int step = 0>
__device__ __forceinline__ void expand_tile(TileExpander& tile, Word dense) {
    const uint2 a = tile.upper.expand<step>(), b = tile.lower.expand<step>();
    const uint2 c = tile.upper.expand<step + 1>(), d = tile.lower.expand<step + 1>();
    st_shared_v4(dense + 8 * step, uint4{a.x, a.y, c.x, c.y});
    st_shared_v4(dense + kTileRows / 2 * kRowPitch + 8 * step, uint4{b.x, b.y, d.x, d.y});
    if constexpr (step + 2 < kSteps) expand_tile<step + 2>(tile, dense);
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarpSize) semisparse_bitmask_unpack(
    const unsigned char* __restrict__ tiles,            // [row tiles, column_tiles, kTileBytes]
    unsigned short* __restrict__ w,                     // [n, pitch]; pitch is a multiple of 8
    int n, int pitch, int tile_count, int column_tiles
) {
    extern __shared__ __align__(256) unsigned char shared[];
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int stride = gridDim.x * WARPS;
    const Word base = smem_address(shared);
    const Word dense = base + WARPS * STAGES * kTileBytes + warp * kDenseBytes;
    const int first = blockIdx.x * WARPS + warp;
    auto copy = [&](Word to, int index) {
        copy_tile<kTileBytes>(to, tiles + static_cast<long long>(index) * kTileBytes, lane);
    };
    const Word ring = base + warp * STAGES * kTileBytes;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        if (first + i * stride < tile_count) copy(ring + i * kTileBytes, first + i * stride);
        cp_async_commit_group();
    }
    int stage = 0;
#pragma unroll 1
    for (int index = first; index < tile_count; index += stride) {
        const Word source = ring + stage * kTileBytes;
        wait_tiles<STAGES - 1>();
        TileExpander tile(source, lane);
        expand_tile(tile, dense + lane / 4 * kRowPitch + lane % 4 * kBlockPitch);
        __syncwarp();
        if (index + STAGES * stride < tile_count) copy(source, index + STAGES * stride);
        cp_async_commit_group();
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
