// Numbers of the weight's type, SCALAR (__half, __nv_bfloat16 or float), and how they are read and written.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Word = unsigned int;

constexpr int kWarp = 32;
constexpr Word kAllLanes = 0xffffffffu;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(float* place, float value) { *place = value; }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }

// 16 bytes that are read once: kept out of the first-level cache.
__device__ __forceinline__ uint4 stream(const void* place) {
    uint4 got;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(place));
    return got;
}

// The number at `index` of those that words hold; the index is known when this is compiled.
__device__ __forceinline__ float scalar_of(const Word* words, int index) {
    if constexpr (sizeof(SCALAR) == 4) {
        return __uint_as_float(words[index]);
    } else {
        const unsigned short bits = index % 2 ? words[index / 2] >> 16 : words[index / 2] & 0xffffu;
        return to_float(*reinterpret_cast<const SCALAR*>(&bits));
    }
}
