// Stands in for gqs's primitives.cuh.

#pragma once

#include "mma.cuh"
#include "scalars.cuh"

constexpr Word kAll = 0xffffffff;

constexpr bool is_half(const __half*) { return true; }
constexpr bool is_half(const __nv_bfloat16*) { return false; }
template <typename Scalar> Scalar scalar_of(Word bits, const Scalar*) {
    Scalar value;
    value.bits = static_cast<uint16_t>(bits);
    return value;
}
template <typename Scalar> Word pair_of(float first, float second, const Scalar*) {
    return static_cast<Word>(Scalar(second).bits) << 16 | Scalar(first).bits;
}
inline Word bits_of(__half2 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline Word bits_of(__nv_bfloat162 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline Word kept_constant(Word value, int) { return value; }

inline int byte_of(Word word, int index) { return word >> 8 * index & 255; }

inline void mma(int (&sums)[4], const Word (&a)[4], Word b0, Word b1) {
    const int lane = threadIdx.x % 32;
    Warp& all = warp();
    std::copy(a, a + 4, all.a[lane]);
    all.b[lane][0] = b0;
    all.b[lane][1] = b1;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const Word left = all.a[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
            const Word right = all.b[column * 4 + k % 16 / 4][k / 16];
            sums[i] += byte_of(left, k % 4) * static_cast<int8_t>(byte_of(right, k % 4));
        }
    }
    __syncwarp();
}

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(byte_of(a, i)) * static_cast<int8_t>(byte_of(b, i));
    return sum;
}

inline void check_aligned(const void* place, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(place) % bytes) fail("a load is not aligned");
}

template <int count> void load_words(Word (&words)[count], const Word* place) {
    check_aligned(place, 4 * count);
    std::memcpy(words, place, 4 * count);
}

template <int count> void read_words(Word* words, const void* place) {
    check_aligned(place, count % 4 ? 8 : 16);
    std::memcpy(words, place, 4 * count);
}

template <typename T> Word load(const T* place) { return *place; }

inline bool is_last(int* arrivals, int others) {
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) {
        before = std::exchange(*arrivals, *arrivals + 1);
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(~0u, before, 0) == others;
}
