// Element, the type of x, scale, bias and y in gemm.cu and gemm_wgmma.cu.

#pragma once

#include "types.cuh"

using Element = SCALAR;
constexpr const Element* kElement = nullptr;  // picks overloads by type

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
