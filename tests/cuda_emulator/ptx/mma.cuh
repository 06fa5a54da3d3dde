// Stands in for ptx/mma.cuh: 16-bit products are summed in float64, and added to the accumulator in float32.

#pragma once

#include "../machine.cuh"
#include "types.cuh"

template <typename Element> float element_of(Word word, int index) {
    Element value;
    value.bits = static_cast<uint16_t>(word >> 16 * index);
    return to_float(value);
}

inline int byte_of(Word word, int index) { return word >> 8 * index & 255; }

template <typename Element>
void mma_m16n8k16(float (&d)[4], const Word (&a)[4], Word b0, Word b1, const Element*) {
    const int lane = threadIdx.x % 32;
    const Warp& all = shown_to_warp(a, b0, b1);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < 16; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const Word right = all.b[column * 4 + k % 8 / 2][k / 8];
            sum += static_cast<double>(element_of<Element>(left, k % 2)) * element_of<Element>(right, k % 2);
        }
        d[i] += static_cast<float>(sum);
    }
    __syncwarp();
}

inline void mma_m16n8k32_u8_s8(int (&d)[4], const Word (&a)[4], Word b0, Word b1) {
    const int lane = threadIdx.x % 32;
    const Warp& all = shown_to_warp(a, b0, b1);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
            const Word right = all.b[column * 4 + k % 16 / 4][k / 16];
            d[i] += byte_of(left, k % 4) * static_cast<int8_t>(byte_of(right, k % 4));
        }
    }
    __syncwarp();
}
