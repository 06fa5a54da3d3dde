// Permutes the columns of x to the order of gemm.cuh's weight fragments, pads x with zeros, and zeroes gemm.cuh's counters.
//
// In a fragment, lane 4 g + t has two words (pairs of columns) of rows g and g + 8 per k-step. Lanes with the same t take block
// t of every four blocks of BLOCK columns: masks of bitmask, groups of gqs. BLOCK = 2 keeps the order of x. A tile of 256
// columns has 64 columns for each t: 32 words, numbered p. Words p of t = 0 to 3 are stored together in 16 bytes; two p are a
// k-step (32 bytes), eight p a slice (128 bytes).
// A slice of TILE_M tokens is stored as wgmma reads it from shared memory: a 128-byte row per token, 16-byte unit u at
// u ^ token % 8 (the 128-byte swizzle), so that gemm.cuh needs one bulk copy per slice and no tensor map.
//
// Grid: (column tiles / 8 rounded up, tokens rounded up to TILE_M). CTA: 256 threads; a thread permutes word p of one token and
// tile for all four t. No shared memory. 1.5 to 3 us up to M = 256. With four 16-byte loads and stores per thread it took
// 5.7 us instead of 3.0 (4096 x 11008, M = 256), because its stores were half sectors.
//
// Compiled with TILE_M and BLOCK (a power of two from 2 to 128).

#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = 256;
constexpr int kWords = 32;  // per t and tile

// Loads two consecutive values; zeros from column k on.
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
    const int own = 2 * (column_tile * kWords + p);  // index among all columns of one t
    const int first = own / BLOCK * (4 * BLOCK) + own % BLOCK;
    unsigned int words[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t)
        if (token < m) words[t] = load_word(x + static_cast<long long>(token) * k, first + t * BLOCK, k, aligned);
    const long long slice = (static_cast<long long>(token / TILE_M) * column_tiles + column_tile) * 4 + p / 8;
    uint4* row = reinterpret_cast<uint4*>(permuted + (slice * TILE_M + token % TILE_M) * 128);
    row[(p ^ token) % 8] = uint4{words[0], words[1], words[2], words[3]};
}
