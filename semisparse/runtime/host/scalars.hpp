// The types in which weights are stored, and their values in float32.

#pragma once

#include <cstdint>
#include <cstring>

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Float32 {
    using Stored = uint32_t;
    static float widen(Stored stored) { return from_bits(stored); }
};

struct Float16 {
    using Stored = uint16_t;
    static float widen(Stored stored) {
        const uint32_t magnitude = stored & 0x7fffu;
        // The exponent's bias grows by 112, but infinities and NaN keep the largest exponent, and a subnormal is its fraction
        // in units of 2^-24.
        const float value = magnitude >= 0x7c00u  ? from_bits(magnitude << 13 | 0x7f800000u)
                            : magnitude >= 0x400u ? from_bits((magnitude << 13) + 0x38000000u)
                                                  : static_cast<float>(magnitude) * 0x1p-24f;
        return stored & 0x8000u ? -value : value;
    }
};

struct BFloat16 {
    using Stored = uint16_t;
    static float widen(Stored stored) { return from_bits(static_cast<uint32_t>(stored) << 16); }
};

// Calls `use` with the type that `number` stands for: 0 float32, 1 float16, 2 bfloat16.
template <typename Use>
auto with_type(int64_t number, Use use) {
    if (number == 0) return use(Float32());
    if (number == 1) return use(Float16());
    return use(BFloat16());
}
