// What a lane of the layout `paper` loads at a time, and the columns of its entries.
//
// Compiled for SCALAR (scalars.cuh) and DELTA_BITS (4 or 8).

#pragma once

#include "../cuda/scalars.cuh"
#include "../cuda/warp.cuh"

// VECTOR columns' deltas, and the values of ROWS rows in each.
template <int ROWS, int VECTOR>
struct Load {
    static constexpr int kBytes = ROWS * VECTOR * (int)sizeof(SCALAR);
    static constexpr int kBits = VECTOR * DELTA_BITS;

    Word values[(kBytes + 3) / 4];
    Word deltas;

    // Reads kBytes, a power of two.
    __device__ __forceinline__ void read_values(const char* from) {
        if constexpr (kBytes >= 16) {
#pragma unroll
            for (int part = 0; part < kBytes / 16; ++part) {
                const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from) + part);
                values[4 * part] = bits.x;
                values[4 * part + 1] = bits.y;
                values[4 * part + 2] = bits.z;
                values[4 * part + 3] = bits.w;
            }
        } else if constexpr (kBytes == 8) {
            const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from));
            values[0] = bits.x;
            values[1] = bits.y;
        } else if constexpr (kBytes == 4) {
            values[0] = __ldg(reinterpret_cast<const Word*>(from));
        } else {
            values[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
        }
    }

    // Adds the first `count` deltas to `start`; `count` is a compile-time constant.
    __device__ __forceinline__ Word column_after(Word start, int count) const {
        if constexpr (DELTA_BITS == 8) {
            return add_bytes(deltas, count, start);
        } else {
            start = add_bytes(deltas & 0x0f0f0f0fu, (count + 1) / 2, start);
            return add_bytes(deltas >> 4 & 0x0f0f0f0fu, count / 2, start);
        }
    }

    static __device__ __forceinline__ Word add_bytes(Word bytes, int count, Word start) {
        return count == 0 ? start : __dp4a(bytes, 0x01010101u >> 8 * (4 - count), start);
    }
};

// The loads of a bundle, those of 32 lanes alternating.
template <int ROWS, int VECTOR>
struct Loads {
    const char* values;
    const unsigned char* deltas;

    __device__ __forceinline__ Loads(
        const SCALAR* all_values, const unsigned char* all_deltas, long long first_value, long long first_delta
    )
        : values(reinterpret_cast<const char*>(all_values + first_value)), deltas(all_deltas + first_delta * DELTA_BITS / 8) {}

    __device__ __forceinline__ Load<ROWS, VECTOR> get(int index, int lane) const {
        Load<ROWS, VECTOR> load;
        const int number = index * kWarp + lane;
        load.read_values(values + (long long)number * load.kBytes);
        if constexpr (load.kBits == 32) {
            load.deltas = __ldcs(reinterpret_cast<const Word*>(deltas) + number);
        } else if constexpr (load.kBits == 16) {
            load.deltas = __ldcs(reinterpret_cast<const unsigned short*>(deltas) + number);
        } else if constexpr (load.kBits == 8) {
            load.deltas = __ldcs(deltas + number);
        } else {
            load.deltas = __ldcs(deltas + number / 2) >> 4 * (number % 2) & 15;
        }
        return load;
    }
};
