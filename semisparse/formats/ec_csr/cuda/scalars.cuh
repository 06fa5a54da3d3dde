// Values of the weight's type that were loaded as words.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float).

#pragma once

#include "types.cuh"

// The value at `index` of those in `words`, in float32; the index is a compile-time constant.
__device__ __forceinline__ float scalar_at(const Word* words, int index) {
    if constexpr (sizeof(SCALAR) == 4) {
        return __uint_as_float(words[index]);
    } else {
        const unsigned short bits = index % 2 ? words[index / 2] >> 16 : words[index / 2] & 0xffffu;
        return to_float(*reinterpret_cast<const SCALAR*>(&bits));
    }
}
