// Stream-K between the blocks of a cluster: each cluster has tiles of 16 rows whole, whose chunks, one after another, are cut into
// strips, dealt out in equal runs to its blocks, and a block's run to its warps. A warp writes the tiles that lie in its run whole.
// Of the others it keeps its share; when a block's warps are done, the shares of a tile are added in the order of the warps, and
// where two blocks share it, by the second, which the first sends its sums to: every run gives the same bits, and nothing is left
// in memory.
//
// Compiled for CLUSTER (blocks; each has as many strips as a tile, or there are two, so that no three share a tile).

#pragma once

#include "sent.cuh"
#include "strip.cuh"

struct Division {
    int tile_chunks, tile_strips;
    int begin, end;    // strips of this block
    int run, strips;   // of this warp: its first strip, and how many
    int first, last;   // its chunks; the one behind them
    Sent<kCells> sent;

    // A cluster has `each` tiles, the first `more` one more.
    __device__ __forceinline__ Division(int tile_chunks, int each, int more)
        : tile_chunks(tile_chunks), tile_strips((tile_chunks + BATCH - 1) / BATCH) {
        const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, warp = warp_of_block();
        const int from = (cluster * each + min(cluster, more)) * tile_strips, count = (each + (cluster < more)) * tile_strips;
        begin = from + count * rank / CLUSTER;
        end = from + count * (rank + 1) / CLUSTER;
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
        // A warp a tile, the one that another block waits for first.
        const int first_tile = begin / tile_strips;
        for (int tile = (end - 1) / tile_strips - warp_of_block(); tile >= first_tile; tile -= WARPS) {
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

    // Of a tile that no warp had whole: its cells a lane each, to y or to the block that ends it.
    __device__ __forceinline__ void add_shares(int tile, const float (&shares)[WARPS][2][kCells], const Output& output) const {
        const int tile_begin = tile * tile_strips, tile_end = tile_begin + tile_strips;
        const int from = max(tile_begin, begin), to = min(tile_end, end);
        const bool begins = from == tile_begin, ends = to == tile_end;
        const int first_warp = warp_of(from), last_warp = warp_of(to - 1);
        if (begins && ends && first_warp == last_warp) return;
        if (!begins) sent.wait();
        if (!ends) sent.wait_for_next_block();
#pragma unroll 1
        for (int cell = threadIdx.x % 32; cell < kCells; cell += 32) {
            float share = begins ? 0.0f : sent.get(cell);
            for (int i = first_warp; i <= last_warp; ++i) share += shares[i][begins && i == first_warp][cell];
            if (ends) output.write(tile * kRows + cell % kRows, cell / kRows, share);
            else sent.send(cell, share);
        }
    }
};
