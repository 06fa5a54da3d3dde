// The lanes of a warp, which walk side by side.

#pragma once

#include "copies.cuh"

constexpr int kWarp = 32;
constexpr Word kAllLanes = 0xffffffffu;
