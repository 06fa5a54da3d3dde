// Numbers of the weight's type, SCALAR (__half, __nv_bfloat16 or float), and how they are read and written.

#pragma once

#include "types.cuh"
#include "warp.cuh"

// The number at `index` of those that words hold; the index is known when this is compiled.
__device__ __forceinline__ float scalar_of(const Word* words, int index) {
    if constexpr (sizeof(SCALAR) == 4) {
        return __uint_as_float(words[index]);
    } else {
        const unsigned short bits = index % 2 ? words[index / 2] >> 16 : words[index / 2] & 0xffffu;
        return to_float(*reinterpret_cast<const SCALAR*>(&bits));
    }
}
