// The order of x that gemm.cuh reads.
//
// In a weight fragment, lane 4 g + t has two words (pairs of columns) of rows g and g + 8 per k-step. Lanes with the same t take
// block t of every four blocks of `block` columns (a power of two from 2 to 128), which share a mask or a scale. With 2 the order of x
// is kept. A tile of 256 columns has 64 columns for each t: 32 words, numbered p. Words p of t = 0 to 3 are stored together in 16
// bytes; two p are a k-step (32 bytes), eight p a slice (128 bytes).
// A slice of tile_m tokens is stored as wgmma reads it from shared memory: a 128-byte row per token, 16-byte unit u at
// u ^ token % 8 (the 128-byte swizzle), so that gemm.cuh needs one bulk copy per slice and no tensor map.

#pragma once

// Returns the first of the two columns of word p of t = 0. Those of t are t * block further.
__device__ __forceinline__ int first_column(int column_tile, int p, int block) {
    const int own = column_tile * 64 + 2 * p;  // among the columns of one t
    return own + 3 * (own & -block);
}

// Returns the 16-byte unit of words p of a token.
__device__ __forceinline__ long long permuted_unit(int token, int column_tile, int p, int tile_m, int column_tiles) {
    const int slice = (token / tile_m * column_tiles + column_tile) * 4 + p / 8, row = token % tile_m;
    return static_cast<long long>(slice) * tile_m * 8 + row * 8 + (p ^ row) % 8;
}
