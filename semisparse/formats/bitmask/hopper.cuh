// How Hopper's tensor cores take a tile's weights, out of registers; and blocks that wait for one another.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "types.cuh"
#include "tiled.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/global.cuh"
#include "ptx/wgmma.cuh"

// Two sums in one word, the first in its low half; `pack2` compiles to other code in two builds of tiled_gemm.cu.
template <typename Scalar>
__device__ __forceinline__ Word pack(float low, float high) {
    Scalar values[2];
    store(values, low), store(values + 1, high);
    return *reinterpret_cast<const Word*>(values);
}

// Waits until so many blocks have been counted in.
__device__ __forceinline__ void wait_for_blocks(const int* counter, int blocks) {
    int found;
    do found = ld_acquire_gpu(counter);
    while (found < blocks);
}
