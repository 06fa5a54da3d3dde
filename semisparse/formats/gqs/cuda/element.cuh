// Element, the type of x, scale, bias and y.

#pragma once

#include "types.cuh"

using Element = SCALAR;
constexpr const Element* kElement = nullptr;  // selects overloads by type

__device__ constexpr bool is_half(const __half*) { return true; }
__device__ constexpr bool is_half(const __nv_bfloat16*) { return false; }
constexpr bool kHalf = is_half(kElement);

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
