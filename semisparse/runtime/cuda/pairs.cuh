// Two 16-bit values in a word.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "word.cuh"

// The first in the low half.
__device__ __forceinline__ Word pair_of(float first, float second, const __half*) {
    const __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<const Word*>(&both);
}
__device__ __forceinline__ Word pair_of(float first, float second, const __nv_bfloat16*) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const Word*>(&both);
}

// Of a matrix of 8 x 8 values, a lane's two of row lane / 4 for two of column lane / 4.
__device__ __forceinline__ Word transposed(Word row) {
    Word column;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
}
