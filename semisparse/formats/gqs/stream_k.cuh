// Stream-K within a block: each block has tiles of 16 rows whole, whose chunks, one after another, are cut into strips, dealt out
// in equal runs to its warps. A strip takes a warp the same instructions whatever it keeps, so runs are equal in strips, not in
// groups. A warp writes the tiles that lie in its run whole. Of the others it keeps its share; when all are done, the shares of a
// tile are added in the order of the warps: every run gives the same bits, and no block waits for another.

#pragma once

#include "strip.cuh"

struct Division {
    int tile_chunks, tile_strips;
    int begin, end;    // strips of this block
    int run, strips;   // of this warp: its first strip, and how many
    int first, last;   // its chunks; the one behind them

    // A block has `each` tiles, the first `more` one more.
    __device__ __forceinline__ Division(int tile_chunks, int each, int more)
        : tile_chunks(tile_chunks), tile_strips((tile_chunks + BATCH - 1) / BATCH) {
        const int block = blockIdx.x, warp = warp_of_block();
        begin = (block * each + min(block, more)) * tile_strips;
        end = begin + (each + (block < more)) * tile_strips;
        run = begin_of_warp(warp);
        strips = begin_of_warp(warp + 1) - run;
        first = chunk_of(run);
        last = chunk_of(run + strips);
    }

    __device__ __forceinline__ int chunk_of(int strip) const {
        if (WHOLE) return strip * BATCH;
        const int tile = strip / tile_strips;
        return tile * tile_chunks + (strip - tile * tile_strips) * BATCH;
    }

    __device__ __forceinline__ int begin_of_warp(int warp) const { return begin + (end - begin) * warp / WARPS; }
    // The last warp that begins at a strip or before.
    __device__ __forceinline__ int warp_of(int strip) const { return ((strip - begin + 1) * WARPS - 1) / (end - begin); }

    __device__ __forceinline__ void sum(Stream& stream, Product& product, const Output& output) const {
        __shared__ float shares[WARPS][2][kCells];
        sum_run(shares[warp_of_block()], stream, product, output);
        __syncthreads();
        // A warp a tile.
        for (int tile = begin / tile_strips + warp_of_block(); tile * tile_strips < end; tile += WARPS) {
            add_shares(tile, shares, output);
        }
    }

    // A warp's run: `shares` gets what it has of a tile that began before (nothing if it has no strip), then of one that goes on
    // after it.
    __device__ __forceinline__ void sum_run(float (&shares)[2][kCells], Stream& stream, Product& product, const Output& output) const {
        int tile = run / tile_strips, strip = run - tile * tile_strips, left = strips;
        const Word bit = pinned(1u << threadIdx.x % 32);
        product.begin_run(strip * kStripColumns);
        if (left == 0) product.each([&](int row, int token, float) { shares[0][token * kRows + row] = 0.0f; });
        while (left > 0) {
            const int until = min(strip + left, tile_strips);
            const bool begins = strip == 0, ends = until == tile_strips;
            left -= until - strip;
            for (; strip < until; ++strip) add_strip(product, stream, strip, tile_chunks, bit);
            if (begins && ends) {
                product.each([&](int row, int token, float sum) { output.write(tile * kRows + row, token, sum); });
            } else {
                float* share = shares[begins];
                product.each([&](int row, int token, float sum) { share[token * kRows + row] = sum; });
            }
            product.clear();
            strip = 0;
            ++tile;
        }
    }

    // Of a tile that no warp had whole: its cells a lane each.
    __device__ __forceinline__ void add_shares(int tile, const float (&shares)[WARPS][2][kCells], const Output& output) const {
        const int first_warp = warp_of(tile * tile_strips), last_warp = warp_of((tile + 1) * tile_strips - 1);
        if (first_warp == last_warp) return;
#pragma unroll 1
        for (int cell = threadIdx.x % 32; cell < kCells; cell += 32) {
            float sum = shares[first_warp][1][cell];
            for (int i = first_warp + 1; i <= last_warp; ++i) sum += shares[i][0][cell];
            output.write(tile * kRows + cell % kRows, cell / kRows, sum);
        }
    }
};
