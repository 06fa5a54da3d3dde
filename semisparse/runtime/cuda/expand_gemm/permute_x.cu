// Permutes the columns of x to the order of gemm.cuh's weight fragments (permuted.cuh), pads x with zeros, and zeroes gemm.cuh's
// counters.
//
// A warp permutes a token of a tile at a time: lane p word p, for all four t.
//
// Grid: up to a few CTAs per SM, whose warps stride over all tokens and tiles. CTAs are small, so that those of gemm.cuh start
// beside them and fetch weights: four warps, 32 registers per thread, no shared memory.
//
// Compiled with TILE_M and BLOCK (a power of two from 2 to 128).

#include "permuted.cuh"
#include "start_gemm.cuh"

constexpr int kThreads = 128;
constexpr int kUnroll = 3;  // tokens of a warp in flight

// Loads two consecutive values; zeros from column k on. `aligned`: the row begins at a multiple of 4 bytes, and k is even.
template <bool aligned>
__device__ __forceinline__ unsigned int load_word(const unsigned short* row, int column, int k) {
    if constexpr (aligned) return column < k ? *reinterpret_cast<const unsigned int*>(row + column) : 0;
    const unsigned int low = column < k ? row[column] : 0, high = column + 1 < k ? row[column + 1] : 0;
    return low | high << 16;
}

// A token of a tile.
struct Cursor {
    int token, column_tile;
    // Advances by `tokens` and `tiles` of column_tiles.
    __device__ __forceinline__ void advance(int tokens, int tiles, int column_tiles) {
        token += tokens, column_tile += tiles;
        if (column_tile >= column_tiles) column_tile -= column_tiles, ++token;
    }
};

// Permutes the tokens of all tiles, as one of `warps` warps.
template <bool aligned>
__device__ __forceinline__ void permute(const unsigned short* x, unsigned char* permuted, int m, int k, int column_tiles,
                                        int tokens, int warp, int warps, int p) {
    const int by_tokens = warps / column_tiles, by_tiles = warps % column_tiles;
    Cursor load{warp / column_tiles, warp % column_tiles}, store = load;
    while (store.token < tokens) {
        uint4 units[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i, load.advance(by_tokens, by_tiles, column_tiles)) {
            const int first = first_column(load.column_tile, p, BLOCK), end = load.token < m ? k : 0;
            const unsigned short* row = x + static_cast<long long>(load.token) * k;
            units[i] = uint4{load_word<aligned>(row, first, end), load_word<aligned>(row, first + BLOCK, end),
                             load_word<aligned>(row, first + 2 * BLOCK, end), load_word<aligned>(row, first + 3 * BLOCK, end)};
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i, store.advance(by_tokens, by_tiles, column_tiles)) {
            if (store.token >= tokens) break;
            reinterpret_cast<uint4*>(permuted)[permuted_unit(store.token, store.column_tile, p, TILE_M, column_tiles)] = units[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 16) semisparse_permute_x(
    const unsigned short* __restrict__ x,   // [m, k]
    unsigned char* __restrict__ permuted,   // [tokens / TILE_M, 4 * column_tiles, TILE_M, 128 bytes]
    int* __restrict__ counters,             // [counter_count]
    int m, int k, int column_tiles, int counter_count,
    int aligned,                            // whether every row of x begins at a multiple of 4 bytes
    int tokens,                             // m, rounded up to a multiple of TILE_M
    int early                               // whether the GEMM may start before the kernel before has ended
) {
    wait_and_start_gemm(early);
    const int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
    for (int i = thread; i < counter_count; i += threads) counters[i] = 0;
    if (aligned) permute<true>(x, permuted, m, k, column_tiles, tokens, thread / 32, threads / 32, thread % 32);
    else permute<false>(x, permuted, m, k, column_tiles, tokens, thread / 32, threads / 32, thread % 32);
}
