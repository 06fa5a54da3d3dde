// The tile of the weight that a warp of expand_gemm/gemm.cuh or tile_decode/decode.cuh expands at a time.

#pragma once

constexpr int kWarpSize = 32;
constexpr int kTileRows = 16;                    // rows of w: those of a warp's fragment
constexpr int kTileColumns = 256;
constexpr int kSteps = kTileColumns / 16;        // k-steps of wgmma
constexpr int kBlockColumns = kTileColumns / 4;   // consecutive ones of a row that a lane expands, if they are in blocks
