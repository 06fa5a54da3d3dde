// ldmatrix, stmatrix and movmatrix: 8 x 8 matrices of 16-bit values between shared memory and fragments, transposed.

#pragma once

#include "word.cuh"

// Loads four matrices transposed: lane l gives the address of row l % 8 of matrix l / 8, and gets two values of column l / 4
// of each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(Word (&d)[4], Word row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(row) : "memory");
}

// Stores four matrices transposed: lane l has two values of row l / 4 of each matrix, and gives the address of column l % 8 of
// matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(Word column, const Word (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(d[0]),
                 "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}

// Transposes a matrix in registers: from two values of row lane / 4 to two of column lane / 4.
__device__ __forceinline__ Word movmatrix_trans(Word row) {
    Word column;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
}
