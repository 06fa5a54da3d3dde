// Stands in for ptx/cvt.cuh.

#pragma once

#include "../machine.cuh"

unsigned char e4m3_of(float value);  // to nearest even, saturating at 448; NaN is 0x7f
float e4m3_value(unsigned char bits);

inline unsigned short cvt_e4m3x2(float low, float high) { return e4m3_of(high) << 8 | e4m3_of(low); }
