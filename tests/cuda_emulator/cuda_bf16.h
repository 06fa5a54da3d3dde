// Stands in for CUDA's header, as much of it as the kernels use. Each operation is computed in float32 and then rounded to 16 bits,
// which gives the same result as rounding the exact value once.

#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits = 0;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest even; no NaN comes here
    }
    explicit operator float() const;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float narrow;
    std::memcpy(&narrow, &wide, 4);
    return narrow;
}

inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __floats2bfloat162_rn(value, value); }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 pair) { return {pair.x, pair.x}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(
        __bfloat162float(a.x) - __bfloat162float(b.x), __bfloat162float(a.y) - __bfloat162float(b.y));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(
        __bfloat162float(a.x) * __bfloat162float(b.x), __bfloat162float(a.y) * __bfloat162float(b.y));
}
// Exact in the kernels that use it, so the sum in float64 and float32 are the same.
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    auto fma = [](__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
        return static_cast<float>(static_cast<double>(__bfloat162float(a)) * __bfloat162float(b) + __bfloat162float(c));
    };
    return __floats2bfloat162_rn(fma(a.x, b.x, c.x), fma(a.y, b.y, c.y));
}

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { __nv_bfloat16 value; value.bits = bits; return value; }
