// A block has one tile of 16 rows, whole: no block waits for another. Its strips are dealt out to its warps, whose sums are
// added in their order.

#pragma once

#include "strip.cuh"

struct Division {
    int tile_chunks;
    int begin, end;    // strips of this warp
    int first, last;   // its chunks, of all; the one behind them

    __device__ __forceinline__ Division(int tile_chunks, int, int) : tile_chunks(tile_chunks) {
        const int strips = (tile_chunks + BATCH - 1) / BATCH, warp = warp_of_block();
        begin = strips * warp / WARPS;
        end = strips * (warp + 1) / WARPS;
        first = blockIdx.x * tile_chunks + begin * BATCH;
        last = blockIdx.x * tile_chunks + (WHOLE ? end * BATCH : min(end * BATCH, tile_chunks));
    }

    __device__ __forceinline__ void sum(Stream& stream, Product& product, const Output& output) const {
        __shared__ float sums[WARPS][kCells];
        const int warp = warp_of_block();
        const Word bit = pinned(1u << threadIdx.x % 32);
        product.begin_run(begin * kStripColumns);
#pragma unroll 1
        for (int strip = begin; strip < end; ++strip) add_strip(product, stream, strip, tile_chunks, bit);
        product.each([&](int row, int token, float sum) { sums[warp][token * kRows + row] = sum; });
        __syncthreads();
#pragma unroll 1
        for (int cell = threadIdx.x; cell < kRows * output.m; cell += 32 * WARPS) {
            float sum = sums[0][cell];
#pragma unroll
            for (int i = 1; i < WARPS; ++i) sum += sums[i][cell];
            output.write(blockIdx.x * kRows + cell % kRows, cell / kRows, sum);
        }
    }
};
