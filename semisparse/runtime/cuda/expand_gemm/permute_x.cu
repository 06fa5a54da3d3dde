// Permutes the columns of x to the order of the weight fragments of gemm.cuh, pads them with zeros, and zeroes its counters.
//
// In a fragment, lane 4 g + t has two words (pairs of columns) of rows g and g + 8 per k-step. Lane t's columns are those of
// block t, BLOCK columns, of each 4 * BLOCK: a mask of bitmask, a group of gqs. With BLOCK = 2 the order is x's own. A
// tile of 256 columns is 64 of each t, so 32 words p. Word p of all four t are 16 bytes, 32 bytes a k-step, 128 bytes a slice
// of four k-steps.
// A slice of TILE_M tokens is stored as wgmma reads it from shared memory: a 128-byte row per token, its 16-byte units swizzled
// (XORed with the token's number modulo 8), so that gemm.cuh needs one bulk copy per slice and no tensor map.
//
// Grid: (column tiles / 8 rounded up, tokens rounded up to TILE_M). CTA: 256 threads, a thread takes one token and word p of a
// tile's four blocks. No shared memory. 1.5 to 3 us up to M = 256; as 16-byte units per thread it took 5.7 us for 3.0
// (4096 x 11008, M = 256), because its stores were half sectors.
//
// Compiled with TILE_M and BLOCK (a power of two from 2 to 128).

#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = 256;
constexpr int kWords = 32;  // of each t per tile

// Two neighbouring values; columns from k on are zeros.
__device__ __forceinline__ unsigned int load_word(const unsigned short* row, int column, int k, bool aligned) {
    if (aligned) return column < k ? *reinterpret_cast<const unsigned int*>(row + column) : 0;
    const unsigned int low = column < k ? row[column] : 0, high = column + 1 < k ? row[column + 1] : 0;
    return low | high << 16;
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_permute_x(
    const unsigned short* __restrict__ x,   // [m, k]
    unsigned char* __restrict__ permuted,   // [tokens / TILE_M, 4 * column_tiles, TILE_M, 128 bytes]
    int* __restrict__ counters,             // [counter_count]
    int m, int k, int column_tiles, int counter_count,
    int aligned                             // whether every row of x begins at a multiple of 4 bytes
) {
    griddepcontrol_launch_dependents();
    const int token = blockIdx.y;
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    for (int i = token * gridDim.x * kThreads + thread; i < counter_count; i += gridDim.y * gridDim.x * kThreads)
        counters[i] = 0;
    const int p = thread % kWords, column_tile = thread / kWords;
    if (column_tile >= column_tiles) return;
    const int own = 2 * (column_tile * kWords + p);  // of the lane's columns along K
    const int first = own / BLOCK * (4 * BLOCK) + own % BLOCK;
    unsigned int words[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t)
        if (token < m) words[t] = load_word(x + static_cast<long long>(token) * k, first + t * BLOCK, k, aligned);
    const long long slice = (static_cast<long long>(token / TILE_M) * column_tiles + column_tile) * 4 + p / 8;
    uint4* row = reinterpret_cast<uint4*>(permuted + (slice * TILE_M + token % TILE_M) * 128);
    row[(p ^ token) % 8] = uint4{words[0], words[1], words[2], words[3]};
}
