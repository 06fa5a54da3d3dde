// Stands in for vector_nm's fours.cuh. Late copies arrive when the barrier is told of them; products are made at once.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "copies.cuh"
#include "scalars.cuh"
#include "waiting.cuh"
#include "warpgroups.cuh"

inline void arrive_after_copies(Word barrier) {
    for (const Copy& copy : self().open) do_copy(copy);
    self().open.clear();
    barrier::arrive(barrier);
}

inline void show_copies() {}
inline void wait_for_own_copies() {}

struct Matrix { Word address, next, eight; };

inline Matrix describe(Word address, Word next, Word eight) {
    if (address % 1024) fail("a swizzled matrix does not begin at a multiple of 1,024 bytes");
    return {address, next, eight};
}

template <typename Scalar> float value_at(const char* place) {
    Scalar value;
    std::memcpy(&value.bits, place, 2);
    return to_float(value);
}

template <typename Scalar>
void multiply(float (&sums)[64], const Word (&w)[4], Matrix x, Word positions, const Scalar*) {
    const int lane = threadIdx.x % 32;
    const Warp& all = shown_to_warp(w, positions, 0);
    for (int half = 0; half < 2; ++half) {
        for (int kept = 0; kept < 16; ++kept) {
            const Word values = all.a[lane / 4 * 4 + kept % 8 / 2][half + kept / 8 * 2];
            const uint16_t bits = values >> 16 * (kept % 2);
            const Word word = all.b[lane / 4 * 4 + kept / 8][0] >> 16 * half;
            const int column = kept / 2 * 4 + (word >> 2 * (kept % 8) & 3);
            const float weight = value_at<Scalar>(reinterpret_cast<const char*>(&bits));
            const char* row = machine_shared + x.address + column / 8 * x.eight + column % 8 * 128;
            for (int i = 0; i < 32; ++i) {
                const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                const char* unit = row + token / 64 * x.next + ((token % 64 / 8) ^ (column % 8)) * 16;
                sums[i / 2 * 4 + half * 2 + i % 2] += weight * value_at<Scalar>(unit + token % 8 * 2);
            }
        }
    }
    __syncwarp();
}
