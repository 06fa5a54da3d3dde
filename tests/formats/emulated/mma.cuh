// Stands in for the shared mma.cuh: each number is added up in float64.

#pragma once

#include "machine.cuh"
#include "scalars.cuh"
#include "word.cuh"

template <typename Scalar>
float half_of(Word word, int index) {
    Scalar value;
    value.bits = static_cast<uint16_t>(word >> 16 * index);
    return to_float(value);
}

template <typename Scalar>
void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const Scalar*) {
    const int lane = threadIdx.x % 32;
    const Warp& all = shown_to_warp(a, b0, b1);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const Word right = all.b[column * 4 + k % 8 / 2][k / 8];
            sum += static_cast<double>(half_of<Scalar>(left, k % 2)) * half_of<Scalar>(right, k % 2);
        }
        sums[i] += static_cast<float>(sum);
    }
    __syncwarp();
}
