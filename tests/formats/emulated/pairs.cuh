// Stands in for pairs.cuh.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "machine.cuh"

template <typename Scalar> Word pair_of(float low, float high, const Scalar*) {
    return static_cast<Word>(Scalar(high).bits) << 16 | Scalar(low).bits;
}

inline Word transposed(Word row) {
    const int lane = threadIdx.x % 32;
    warp().numbers[lane] = row;
    __syncwarp();
    Word column = 0;
    for (int i = 0; i < 2; ++i) {
        const Word found = warp().numbers[(lane % 4 * 2 + i) * 4 + lane / 8];
        column |= (found >> 16 * (lane / 4 % 2) & 0xffff) << 16 * i;
    }
    __syncwarp();
    return column;
}
