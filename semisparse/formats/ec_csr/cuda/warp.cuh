// A warp's lanes, and sums over them.

#pragma once

#include "warp_sum.cuh"

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;
