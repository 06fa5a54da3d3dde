// x in the order in which tiled_gemm.cu's tensor cores take its columns.
//
// A lane owns a whole block of 64 columns, so the 16 columns of a step are 4 of each of a tile's 4 blocks. Of a token's 256
// columns that go with a tile, let word p of block t be its columns 2 p and 2 p + 1: they come out in the order of p, then t.
// So 16 bytes are one word of each block, 32 bytes a step, and 128 bytes a slice of four steps.
//
// A slice of TOKENS tokens is stored as it must lie in shared memory for wgmma: a row of 128 bytes a token, its 16-byte units
// exchanged by the token's number ("128-byte swizzle"); one bulk copy brings it. Columns from k on and tokens from m on are 0.
//
// Compiled for TOKENS (of a token tile).

#include "scalars.cuh"

constexpr int kBlock = 64;
constexpr int kSliceBytes = TOKENS * 128;
constexpr int kThreads = 256;

// Eight values; from k on they are zero.
__device__ __forceinline__ uint4 read_unit(const unsigned short* row, int column, int k, bool vectors) {
    if (vectors) return column < k ? *reinterpret_cast<const uint4*>(row + column) : uint4{};
    union {
        unsigned short values[8];
        uint4 all;
    } unit;
#pragma unroll
    for (int i = 0; i < 8; ++i) unit.values[i] = column + i < k ? row[column + i] : 0;
    return unit.all;
}

// A thread takes 8 columns of each block of one token: words p = 4 unit to 4 unit + 3.
extern "C" __global__ void __launch_bounds__(kThreads) semisparse_bitmask_tiled_columns(
    const unsigned short* __restrict__ x,  // [m, k]
    unsigned char* __restrict__ columns,   // [token tiles, 4 * column_tiles, TOKENS, 128 bytes]
    int m, int k, int column_tiles,
    int vectors                            // whether every row of x is 16-byte aligned
) {
    let_next_kernel_start();
    const int unit = threadIdx.x % 8;
    const int column_tile = blockIdx.x * (kThreads / 8) + threadIdx.x / 8;
    const int token = blockIdx.y;
    if (column_tile >= column_tiles) return;
    uint4 blocks[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t)
        if (token < m)
            blocks[t] = read_unit(x + static_cast<long long>(token) * k, (column_tile * 4 + t) * kBlock + unit * 8, k, vectors);
    const long long slice = static_cast<long long>(token / TOKENS * column_tiles + column_tile) * 4 + unit / 2;
    unsigned char* place = columns + slice * kSliceBytes + token % TOKENS * 128;
    const int first = unit % 2 * 4;
    auto put = [&](int i, uint4 words) { *reinterpret_cast<uint4*>(place + ((first + i) ^ token % 8) * 16) = words; };
    put(0, uint4{blocks[0].x, blocks[1].x, blocks[2].x, blocks[3].x});
    put(1, uint4{blocks[0].y, blocks[1].y, blocks[2].y, blocks[3].y});
    put(2, uint4{blocks[0].z, blocks[1].z, blocks[2].z, blocks[3].z});
    put(3, uint4{blocks[0].w, blocks[1].w, blocks[2].w, blocks[3].w});
}
