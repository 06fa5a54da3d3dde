// The lanes of a warp, which walk side by side.

#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"

constexpr int kWarp = 32;
constexpr Word kAllLanes = 0xffffffffu;
