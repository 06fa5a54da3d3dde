// Stands in for CUDA's header, as much of it as the kernels use. Each operation is computed in float32 and then rounded to 16 bits,
// which gives the same result as rounding the exact value once.

#pragma once

#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits = 0;
    __half() = default;
    explicit __half(float value) { const _Float16 h = static_cast<_Float16>(value); std::memcpy(&bits, &h, 2); }
    explicit operator float() const;
};

inline __half __float2half_rn(float value) { return __half(value); }
inline float __half2float(__half value) {
    _Float16 h;
    std::memcpy(&h, &value.bits, 2);
    return static_cast<float>(h);
}

struct __half2 {
    __half x, y;
};

inline __half::operator float() const { return __half2float(*this); }

inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}

inline __half __ushort_as_half(unsigned short bits) { __half value; value.bits = bits; return value; }
inline __half2 __float2half2_rn(float value) { return {__half(value), __half(value)}; }
