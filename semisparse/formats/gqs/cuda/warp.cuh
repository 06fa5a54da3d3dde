// Warp-uniform values, and values that the compiler must keep in registers.

#pragma once

#include "ptx/word.cuh"

constexpr Word kAllLanes = 0xffffffff;

// Index of this warp in its CTA. The shuffle tells the compiler that the index, and every loop bound computed from it, is
// warp-uniform: 61 instructions per chunk instead of 74 (int8), 75 instead of 84 (codes).
__device__ __forceinline__ int warp_id() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0); }

// Returns `value` from a shuffle of each lane with itself. ptxas keeps a shuffle's result in a register; without it, it would
// rematerialise the value at each use. All lanes must take part.
__device__ __forceinline__ Word keep_in_register(Word value) { return __shfl_sync(kAllLanes, value, threadIdx.x % 32); }

template <typename T> __device__ __forceinline__ const T* keep_in_register(const T* pointer) {
    return reinterpret_cast<const T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), threadIdx.x % 32));
}

// The same for a compile-time constant, whose shuffle alone ptxas would remove. `parameter` is any kernel parameter that is
// never negative: its sign, 0, makes the value unknown to ptxas.
__device__ __forceinline__ Word keep_constant(Word value, int parameter) { return keep_in_register(value + (parameter >> 31)); }
