// Stands in for gqs's primitives.cuh.

#pragma once

#include "mma.cuh"
#include "pairs.cuh"
#include "prefetch.cuh"
#include "scalars.cuh"

constexpr Word kAll = 0xffffffff;

constexpr bool is_half(const __half*) { return true; }
constexpr bool is_half(const __nv_bfloat16*) { return false; }
template <typename Scalar> Scalar scalar_of(Word bits, const Scalar*) {
    Scalar value;
    value.bits = static_cast<uint16_t>(bits);
    return value;
}
inline Word bits_of(__half2 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline Word bits_of(__nv_bfloat162 pair) { return static_cast<Word>(pair.y.bits) << 16 | pair.x.bits; }
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline Word opaque(Word value) { return value; }
template <typename T> T pinned(T value) { return __shfl_sync(kAll, value, threadIdx.x % 32); }
inline Word kept_constant(Word value, int) { return pinned(value); }

inline int byte_of(Word word, int index) { return word >> 8 * index & 255; }

inline void mma(int (&sums)[4], const Word (&a)[4], Word b0, Word b1) {
    const int lane = threadIdx.x % 32;
    const Warp& all = shown_to_warp(a, b0, b1);
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

template <int count> void read_words(Word* words, const void* place) {
    check_aligned(place, count % 4 ? 8 : 16);
    std::memcpy(words, place, 4 * count);
}

inline char* shared_place(Word at, Word bytes) {
    if (at + bytes > shared_bytes) fail("outside shared memory");
    if (at % bytes) fail("a place in shared memory is not aligned");
    return machine_shared + (failure ? 0 : at);
}

template <typename T> Word read_shared_number(Word at) {
    T value;
    std::memcpy(&value, shared_place(at, sizeof value), sizeof value);
    return value;
}

template <int count> void read_shared(Word (&words)[count], Word at) { std::memcpy(words, shared_place(at, 4 * count), 4 * count); }
inline Word read_shared_word(Word at) { return read_shared_number<Word>(at); }
inline Word read_shared_half(Word at) { return read_shared_number<unsigned short>(at); }
inline Word read_shared_byte(Word at) { return read_shared_number<unsigned char>(at); }
inline void write_shared(Word at, const Word (&words)[4]) { std::memcpy(shared_place(at, 16), words, 16); }
inline void write_shared(Word at, Word value) { std::memcpy(shared_place(at, 4), &value, 4); }
inline void write_shared_byte(Word at, char value) { std::memcpy(shared_place(at, 1), &value, 1); }

inline int warp_of_block() { return __shfl_sync<int>(kAll, threadIdx.x / 32, 0); }
inline const char* further(const char* place, Word count, Word bytes) { return place + size_t(count) * bytes; }

inline Word times_plus(Word a, Word b, Word c) { return a * b + c; }
inline bool any_of_warp(bool value) { return __ballot_sync(kAll, value); }

inline Word max_of_warp(Word value) {
    for (int step = 1; step < 32; step *= 2) value = max(value, __shfl_sync(kAll, value, threadIdx.x % 32 ^ step));
    return value;
}

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
inline bool one_of_warp() { return threadIdx.x % 32 == 0; }
