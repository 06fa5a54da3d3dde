// Stands in for ptx/cvt.cuh.

#pragma once

#include "../machine.cuh"

// fp8 e4m3 to nearest even, saturating at 448; NaN is 0x7f.
inline unsigned char e4m3_of(float value) {
    const unsigned char sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7f;
    if (magnitude >= 464) return sign | 0x7e;
    const int exponent = max(magnitude > 0 ? std::ilogb(magnitude) : -6, -6);
    const int eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // 8 to 16, less if subnormal
    return sign | min((exponent + 6) * 8 + eighths, 0x7e);
}

inline float e4m3_value(unsigned char bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

inline unsigned short cvt_e4m3x2(float low, float high) { return e4m3_of(high) << 8 | e4m3_of(low); }
