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

#include "ptx/griddepcontrol.cuh"

constexpr int kBlock = 64;
constexpr int kThreads = 256;
constexpr int kWords = 32;  // of a block

// Two neighbouring values; from k on they are zero.
__device__ __forceinline__ unsigned int read_word(const unsigned short* row, int column, int k, bool words) {
    if (words) return column < k ? *reinterpret_cast<const unsigned int*>(row + column) : 0;
    const unsigned int low = column < k ? row[column] : 0, high = column + 1 < k ? row[column + 1] : 0;
    return low | high << 16;
}

// A thread takes word p of the four blocks of a tile and one token.
extern "C" __global__ void __launch_bounds__(kThreads) semisparse_bitmask_tiled_columns(
    const unsigned short* __restrict__ x,  // [m, k]
    unsigned char* __restrict__ columns,   // [token tiles, 4 * column_tiles, TOKENS, 128 bytes]
    int* __restrict__ counters,            // [count] of tiled_gemm.cu: set to zero
    int m, int k, int column_tiles, int count,
    int words                              // whether every row of x is 4-byte aligned
) {
    griddepcontrol_launch_dependents();
    const int token = blockIdx.y;
    const int place = blockIdx.x * kThreads + threadIdx.x;
    for (int i = token * gridDim.x * kThreads + place; i < count; i += gridDim.y * gridDim.x * kThreads) counters[i] = 0;
    const int p = place % kWords, column_tile = place / kWords;
    if (column_tile >= column_tiles) return;
    unsigned int found[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t)
        if (token < m)
            found[t] = read_word(x + static_cast<long long>(token) * k, (column_tile * 4 + t) * kBlock + 2 * p, k, words);
    const long long slice = (static_cast<long long>(token / TOKENS) * column_tiles + column_tile) * 4 + p / 8;
    uint4* row = reinterpret_cast<uint4*>(columns + (slice * TOKENS + token % TOKENS) * 128);
    row[(p ^ token) % 8] = uint4{found[0], found[1], found[2], found[3]};
}
