// The tile of the weight that a consumer warp of gemm.cuh expands per iteration.

#pragma once

constexpr int kWarpSize = 32;
constexpr int kTileRows = 16;                    // rows of w: those of a warp's fragment
constexpr int kTileColumns = 256;
constexpr int kSteps = kTileColumns / 16;        // k-steps of wgmma
