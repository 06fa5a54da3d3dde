// Stream-K: pieces of equal work, dealt out in equal runs to the blocks, and a block's run to its WARPS.

#pragma once

#include "primitives.cuh"

struct Runs {
    int each, more;  // a block's pieces, and how many blocks have one more
    int begin, end;  // of this block
    int run;         // a warp's pieces; the last warps may have fewer

    __device__ __forceinline__ Runs(int each, int more)
        : each(each), more(more), begin(begin_of(blockIdx.x)), end(begin_of(blockIdx.x + 1)),
          run((end - begin + WARPS - 1) / WARPS) {}

    __device__ __forceinline__ int begin_of(int block) const { return block * each + min(block, more); }

    __device__ __forceinline__ int block_of(int piece) const {
        const int larger = more * (each + 1);
        return piece < larger ? piece / (each + 1) : more + (piece - larger) / each;
    }
};
