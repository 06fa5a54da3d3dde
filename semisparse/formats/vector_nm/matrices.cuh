// Matrices of 8 x 8 values of 16 bits, turned on their way to registers or in them.

#pragma once

#include "word.cuh"

// Four matrices of shared memory: a lane's address is that of a row of one; it gets two of column lane / 4 of each.
__device__ __forceinline__ void load_turned(Word (&to)[4], Word from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
