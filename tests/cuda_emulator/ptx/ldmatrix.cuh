// Stands in for ptx/ldmatrix.cuh.

#pragma once

#include "../machine.cuh"

inline void ldmatrix_x4_trans(Word (&d)[4], Word row) {
    shared_at(row, 16, 16);
    const int lane = threadIdx.x % 32;
    warp().numbers[lane] = row;
    __syncwarp();
    for (int matrix = 0; matrix < 4 && !failure; ++matrix) {
        uint16_t two[2];
        for (int i = 0; i < 2; ++i)
            std::memcpy(two + i, here->shared + warp().numbers[8 * matrix + lane % 4 * 2 + i] + lane / 4 * 2, 2);
        d[matrix] = static_cast<Word>(two[1]) << 16 | two[0];
    }
    __syncwarp();
}

inline void stmatrix_x4_trans(Word column, const Word (&d)[4]) {
    shared_at(column, 16, 16);
    const int lane = threadIdx.x % 32;
    warp().numbers[lane] = column;
    __syncwarp();
    for (int matrix = 0; matrix < 4 && !failure; ++matrix)
        for (int i = 0; i < 2; ++i) {
            const uint16_t value = static_cast<uint16_t>(d[matrix] >> 16 * i);
            std::memcpy(here->shared + warp().numbers[8 * matrix + lane % 4 * 2 + i] + lane / 4 * 2, &value, 2);
        }
    __syncwarp();
}

inline Word movmatrix_trans(Word row) {
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
