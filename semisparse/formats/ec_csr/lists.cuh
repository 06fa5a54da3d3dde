// A lane's list in the layout `banks`: what it loads at a time, and the places after each step.
//
// Compiled for SCALAR (any type of the weight's size) and DELTA_BITS (4 or 8).

#pragma once

#include "types.cuh"
#include "warp.cuh"

constexpr int kSegments = 16;
constexpr int kRun = 2;  // a row ends after a multiple of so many steps
constexpr int kVector = 16 / sizeof(SCALAR);
constexpr int kDeltaBytes = kVector * DELTA_BITS / 8;

struct Deltas {
    Word words[kDeltaBytes > 4 ? 2 : 1];
};

struct Load {
    uint4 values;
    Deltas deltas;

    // The word that holds a step's value.
    __device__ __forceinline__ Word word(int step) const {
        const Word words[4] = {values.x, values.y, values.z, values.w};
        return words[step * sizeof(SCALAR) / 4];
    }
};

// Where a lane finds its loads.
struct List {
    const uint4* values;
    const char* deltas;

    __device__ __forceinline__ List(const uint4* all_values, const void* all_deltas, long long first)
        : values(all_values + first), deltas(static_cast<const char*>(all_deltas) + first * kDeltaBytes) {}

    __device__ __forceinline__ Deltas get_deltas(int index) const {
        const char* from = deltas + (long long)index * kWarp * kDeltaBytes;
        Deltas made;
        if constexpr (kDeltaBytes == 8) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(from));
            made.words[0] = both.x;
            made.words[1] = both.y;
        } else if constexpr (kDeltaBytes == 4) {
            made.words[0] = __ldcs(reinterpret_cast<const Word*>(from));
        } else {
            made.words[0] = __ldcs(reinterpret_cast<const unsigned short*>(from));
        }
        return made;
    }

    __device__ __forceinline__ Load get(int index) const {
        return {ld_global_nc_v4(values + (long long)index * kWarp), get_deltas(index)};
    }
};

// Gives the places after each step, as far as deltas alone say, in units of which a place has `unit`, at most 255.
template <int unit>
struct Places {
    Word odd, even;  // of 4-bit deltas: bytes with the sums up to steps 0, 2, 4, 6 and 1, 3, 5, 7
    const Deltas& deltas;

    __device__ __forceinline__ explicit Places(const Deltas& deltas) : deltas(deltas) {
#if DELTA_BITS == 4
        // A product with 0x01010101 sums bytes; no sum exceeds 8 * 15.
        const Word low = (deltas.words[0] & 0x0f0f0f0fu) * 0x01010101u, high = (deltas.words[0] >> 4 & 0x0f0f0f0fu) * 0x01010101u;
        odd = low + (high << 8);
        even = low + high;
#endif
    }

    // Adds the deltas up to `step` to `start`; for 8 bits, `start` counts from the last multiple of four.
    __device__ __forceinline__ int after(int start, int step) const {
#if DELTA_BITS == 4
        return __dp4a(step % 2 ? even : odd, (Word)unit << 8 * (step / 2), (Word)start);
#else
        return __dp4a(deltas.words[step / 4], (Word)unit * 0x01010101u >> 8 * (3 - step % 4), (Word)start);
#endif
    }

    // Adds all deltas.
    __device__ __forceinline__ int end(int start) const {
        if constexpr (DELTA_BITS == 8 && kVector == 8) start = after(start, 3);
        return after(start, kVector - 1);
    }

    // Whether later steps count from here.
    static __device__ __forceinline__ constexpr bool starts_anew(int step) {
        return step == kVector - 1 || (DELTA_BITS == 8 && step % 4 == 3);
    }
};
