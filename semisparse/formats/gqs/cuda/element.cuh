// What the tensor-core kernels call the type of x, scale, bias and y.

#pragma once

#include "types.cuh"

using Element = SCALAR;
constexpr const Element* kElement = nullptr;  // picks overloads by type

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
