// Units of VECTOR values of type SCALAR, each loaded and stored at once.

#pragma once

#include "types.cuh"

struct alignas(VECTOR * sizeof(SCALAR)) Unit {
    SCALAR values[VECTOR];

    __device__ __forceinline__ float at(int i) const { return to_float(values[i]); }
    __device__ __forceinline__ void set(int i, float value) { store(values + i, value); }  // rounds
};

__device__ __forceinline__ Unit load_unit(const SCALAR* from, int i) { return reinterpret_cast<const Unit*>(from)[i]; }
__device__ __forceinline__ void store_unit(SCALAR* to, int i, const Unit& unit) { reinterpret_cast<Unit*>(to)[i] = unit; }
