// The conversions and the tensor-core product that the kernel here is made of.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Word = unsigned int;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word pair_of(float first, float second, const __half*) { return bits_of(__floats2half2_rn(first, second)); }
__device__ __forceinline__ Word pair_of(float first, float second, const __nv_bfloat16*) {
    return bits_of(__floats2bfloat162_rn(first, second));
}

// sums += a * b for m16n8k16; of a the registers are rows 0 to 7 and 8 to 15 of columns 0 to 7, then of 8 to 15.
__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether this warp is the last of others + 1 to come here; what all of them wrote before is then to be seen. Leaves 0.
__device__ __forceinline__ bool is_last(int* arrivals, int others) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(0xffffffffu, before, 0) == others;
}

// Keeps a number that is used in a loop from being made anew at each use: the assembler cannot see through a shuffle.
__device__ __forceinline__ void keep_in_register(Word& value) {
    value = __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}
