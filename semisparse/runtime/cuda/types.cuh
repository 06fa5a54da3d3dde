// The element types of weights, activations and outputs; kernels compute in float32.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/word.cuh"

constexpr float kFloatMax = 3.4028234663852886e38f;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(__half* to, float value) { *to = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

// Rounds two floats to 16 bits in one word, the first in its low half; the last argument gives the type.
__device__ __forceinline__ Word pack2(float low, float high, const __half*) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const Word*>(&both);
}
__device__ __forceinline__ Word pack2(float low, float high, const __nv_bfloat16*) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const Word*>(&both);
}
