// Stands in for vector_nm's matrices.cuh.

#pragma once

#include "copies.cuh"

inline void load_turned(Word (&to)[4], Word from) {
    if (from % 16 || from + 16 > shared_bytes) fail("a matrix's row is not in shared memory, or not aligned");
    const int lane = threadIdx.x % 32;
    warp().numbers[lane] = from;
    __syncwarp();
    for (int matrix = 0; matrix < 4 && !failure; ++matrix) {
        uint16_t two[2];
        for (int i = 0; i < 2; ++i) {
            const char* row = machine_shared + warp().numbers[8 * matrix + lane % 4 * 2 + i];
            std::memcpy(two + i, row + lane / 4 * 2, 2);
        }
        to[matrix] = static_cast<Word>(two[1]) << 16 | two[0];
    }
    __syncwarp();
}
