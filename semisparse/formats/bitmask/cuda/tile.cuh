// A tile of the layout `tiles` in shared memory, and how a lane expands its weights: values (tile_values.cuh), or codes of 8
// (tile_bytes.cuh) or 4 bits (tile_nibbles.cuh).
//
// Compiled with KEEP (values or codes per block) and BITS (per code; 0 or undefined for values).

#pragma once

#include "expand_gemm/tile_shape.cuh"

constexpr int kWordRowBytes = kWarpSize * 4;     // one word per lane

#if BITS == 8
#include "tile_bytes.cuh"
#elif BITS == 4
#include "tile_nibbles.cuh"
#else
#include "tile_values.cuh"
#endif
