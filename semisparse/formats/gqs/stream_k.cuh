// Stream-K: the chunks of all tiles of 16 rows, one after another, are cut into strips, the strips dealt out in equal runs to the
// blocks, and a block's run to its warps. A warp writes the tiles that lie in its run whole. Of the others it keeps its share;
// when a block's warps are done, the shares of a tile are added in the order of the warps, and where several blocks share it, by
// the last of them, in the order of the blocks: every run gives the same bits.

#pragma once

#include "strip.cuh"

struct Division {
    int tile_chunks, tile_strips;
    int each, more;    // a block's strips, and how many blocks have one more
    int begin, end;    // of this block
    int run, strips;   // of this warp: its first strip, and how many
    int first, last;   // its chunks; the one behind them

    __device__ __forceinline__ Division(int tile_chunks, int each, int more)
        : tile_chunks(tile_chunks), tile_strips((tile_chunks + BATCH - 1) / BATCH), each(each), more(more),
          begin(begin_of(blockIdx.x)), end(begin_of(blockIdx.x + 1)), run(begin_of_warp(warp_of_block())),
          strips(begin_of_warp(warp_of_block() + 1) - run), first(chunk_of(run)), last(chunk_of(run + strips)) {}

    __device__ __forceinline__ int begin_of(int block) const { return block * each + min(block, more); }

    __device__ __forceinline__ int chunk_of(int strip) const {
        if (WHOLE) return strip * BATCH;
        const int tile = strip / tile_strips;
        return tile * tile_chunks + (strip - tile * tile_strips) * BATCH;
    }

    __device__ __forceinline__ int begin_of_warp(int warp) const { return begin + (end - begin) * warp / WARPS; }

    // The last warp that begins at a strip or before.
    __device__ __forceinline__ int warp_of(int strip) const { return ((strip - begin + 1) * WARPS - 1) / (end - begin); }

    __device__ __forceinline__ int block_of(int strip) const {
        const int larger = more * (each + 1);
        return strip < larger ? strip / (each + 1) : more + (strip - larger) / each;
    }

    __device__ __forceinline__ void sum(Stream& stream, Product& product, const Output& output, unsigned long long* parts) const {
        __shared__ float shares[WARPS][2][kCells];
        sum_run(shares[warp_of_block()], stream, product, output);
        __syncthreads();
        // A warp a tile, the one that other blocks wait for first.
        const int first_tile = begin / tile_strips;
        for (int tile = (end - 1) / tile_strips - warp_of_block(); tile >= first_tile; tile -= WARPS) {
            add_shares(tile, shares, output, parts);
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
    __device__ __forceinline__ void add_shares(
        int tile, const float (&shares)[WARPS][2][kCells], const Output& output, unsigned long long* parts
    ) const {
        const int tile_begin = tile * tile_strips, tile_end = tile_begin + tile_strips;
        const int from = max(tile_begin, begin), to = min(tile_end, end);
        const bool begins = from == tile_begin, ends = to == tile_end;
        const int first_warp = warp_of(from), last_warp = warp_of(to - 1);
        if (begins && ends && first_warp == last_warp) return;
#pragma unroll 1
        for (int cell = threadIdx.x % 32; cell < kRows * output.m; cell += 32) {
            float total = 0.0f;
            if (ends) {
                for (int block = block_of(tile_begin); block < static_cast<int>(blockIdx.x); ++block) {
                    total += take_part(parts + static_cast<size_t>(block) * kCells + cell);
                }
            }
            float share = shares[first_warp][begins][cell];
            for (int i = first_warp + 1; i <= last_warp; ++i) share += shares[i][0][cell];
            if (ends) output.write(tile * kRows + cell % kRows, cell / kRows, total + share);
            else leave_part(parts + static_cast<size_t>(blockIdx.x) * kCells + cell, share);
        }
    }
};
