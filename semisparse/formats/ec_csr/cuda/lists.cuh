// A lane's list of entries in a row panel, which it reads load by load. Layout: `Row panels` in README.md.
//
// Macros: SCALAR, a type of the same size as the weight's dtype, and DELTA_BITS, 4 or 8.

#pragma once

#include "ptx/global.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int kSegments = 16;                     // per row panel
constexpr int kRowMultiple = 2;                   // a row's entries in a list are a multiple of this
constexpr int kVector = 16 / sizeof(SCALAR);      // entries per load
constexpr int kDeltaBytes = kVector * DELTA_BITS / 8;

struct Deltas {
    Word words[kDeltaBytes > 4 ? 2 : 1];
};

// `kVector` entries: 16 bytes of values, and their deltas.
struct Load {
    uint4 values;
    Deltas deltas;

    // Returns the 32-bit word that holds an entry's value.
    __device__ __forceinline__ Word word(int entry) const {
        const Word words[4] = {values.x, values.y, values.z, values.w};
        return words[entry * sizeof(SCALAR) / 4];
    }
};

// A lane's loads in global memory: every 32nd load, since the 32 lanes' loads are interleaved.
struct List {
    const uint4* values;
    const char* deltas;

    __device__ __forceinline__ List(const uint4* all_values, const void* all_deltas, long long first)
        : values(all_values + first), deltas(static_cast<const char*>(all_deltas) + first * kDeltaBytes) {}

    __device__ __forceinline__ Deltas get_deltas(int index) const {
        const char* from = deltas + (long long)index * kWarp * kDeltaBytes;
        Deltas result;
        if constexpr (kDeltaBytes == 8) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(from));
            result.words[0] = both.x;
            result.words[1] = both.y;
        } else if constexpr (kDeltaBytes == 4) {
            result.words[0] = __ldcs(reinterpret_cast<const Word*>(from));
        } else {
            result.words[0] = __ldcs(reinterpret_cast<const unsigned short*>(from));
        }
        return result;
    }

    __device__ __forceinline__ Load get(int index) const {
        return {ld_global_nc_v4(values + (long long)index * kWarp), get_deltas(index)};
    }
};

// The positions of a load's entries, in units of the caller: a position counts `unit` (at most 255), for instance the bytes per
// value of x. The caller finds the ends of rows.
template <int unit>
struct Positions {
    Word at_even, at_odd;  // of 4-bit deltas: bytes with the prefix sums of entries 0, 2, 4, 6 and 1, 3, 5, 7
    const Deltas& deltas;

    __device__ __forceinline__ explicit Positions(const Deltas& deltas) : deltas(deltas) {
#if DELTA_BITS == 4
        // Multiplying by 0x01010101 makes prefix sums of bytes; none exceeds 8 * 15.
        const Word low = (deltas.words[0] & 0x0f0f0f0fu) * 0x01010101u;
        const Word high = (deltas.words[0] >> 4 & 0x0f0f0f0fu) * 0x01010101u;
        at_even = low + (high << 8);
        at_odd = low + high;
#endif
    }

    // Returns `start` plus the deltas of entries 0 to `entry`. With 8-bit deltas the sum begins at entry - entry % 4, so there
    // `start` is what this returned for the entry before (`restarts_after`).
    __device__ __forceinline__ int after(int start, int entry) const {
#if DELTA_BITS == 4
        return __dp4a(entry % 2 ? at_odd : at_even, (Word)unit << 8 * (entry / 2), (Word)start);
#else
        return __dp4a(deltas.words[entry / 4], (Word)unit * 0x01010101u >> 8 * (3 - entry % 4), (Word)start);
#endif
    }

    // Returns `start` plus all deltas.
    __device__ __forceinline__ int end(int start) const {
        if constexpr (DELTA_BITS == 8 && kVector == 8) start = after(start, 3);
        return after(start, kVector - 1);
    }

    // Returns whether this entry's result is the `start` of the entries after it.
    static __device__ __forceinline__ constexpr bool restarts_after(int entry) {
        return entry == kVector - 1 || (DELTA_BITS == 8 && entry % 4 == 3);
    }
};
