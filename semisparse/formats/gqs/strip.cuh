// What a warp does with a strip, BATCH chunks of a tile, and where a tile's sums go.

#pragma once

#if TOKENS >= 8
#include "by_weights.cuh"
#elif ROUNDED
#include "by_bytes.cuh"
#else
#include "by_codes.cuh"
#endif
#include "stream.cuh"

constexpr int kCells = kRows * TOKENS;  // sums of a tile, token after token

__device__ __forceinline__ void read_chunk(Chunk& chunk, const Pieces& pieces, const Header& header, Word below) {
    chunk.mask[0] = header.low;
    chunk.mask[1] = header.high;
    pieces.read(chunk, 0, header.start + __popc(header.low & below));
    pieces.read(chunk, 1, header.middle + __popc(header.high & below));
}

// Adds a strip of a tile of so many chunks; the same warp's next one begins at column 0 where this one ends the tile.
__device__ __forceinline__ void add_strip(Product& product, Stream& stream, int strip, int tile_chunks, Word bit) {
    Header headers[BATCH];
    Chunk pair[2];  // the next one is read before one is multiplied
    product.begin_strip(strip * kStripColumns, (strip + 1) * BATCH < tile_chunks ? (strip + 1) * kStripColumns : 0);
    stream.next(headers, tile_chunks - strip * BATCH);
    stream.pieces.require(headers[BATCH - 1].end());
    read_chunk(pair[0], stream.pieces, headers[0], bit - 1);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (i + 1 < BATCH) read_chunk(pair[(i + 1) % 2], stream.pieces, headers[i + 1], bit - 1);
        product.add(pair[i % 2], i, bit);
    }
}

struct Output {
    const SCALAR* bias;      // [n] or null
    SCALAR* __restrict__ y;  // [m, n]
    int m, n;
    const Product& from;

    __device__ __forceinline__ void write(int row, int token, float sum) const {
        if (row >= n || token >= m) return;
        const float product = from.final(sum, token);
        store(y + static_cast<long long>(token) * n + row, product + (bias ? to_float(bias[row]) : 0.0f));
    }
};
