// cvt: conversions that CUDA's headers do not offer as one instruction.

#pragma once

// Rounds two floats to fp8 (e4m3), saturating; the first becomes the low byte (Ada and later).
__device__ __forceinline__ unsigned short cvt_e4m3x2(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
