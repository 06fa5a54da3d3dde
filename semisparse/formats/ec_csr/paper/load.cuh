// Loads from a weight in the layout `paper` (README.md, "EC-CSR"): the values and column deltas that one lane reads at a time,
// and the columns that the deltas stand for.
//
// Macros: SCALAR, the type of values (scalars.cuh); DELTA_BITS, bits per column delta: 4 or 8.

#pragma once

#include "../cuda/scalars.cuh"
#include "../cuda/warp.cuh"

// One load of a lane: VECTOR entries, each with a column delta and the values of ROWS rows in that column.
template <int ROWS, int VECTOR>
struct LaneLoad {
    static constexpr int kValueBytes = ROWS * VECTOR * (int)sizeof(SCALAR);
    static constexpr int kDeltaBits = VECTOR * DELTA_BITS;

    Word values[(kValueBytes + 3) / 4];  // entry by entry, ROWS values each
    Word deltas;                    // that of entry i in the bits from i * DELTA_BITS on

    // Reads kValueBytes, a power of two from 2 on, from an address that is a multiple of min(kValueBytes, 16).
    __device__ __forceinline__ void read_values(const char* source) {
        if constexpr (kValueBytes >= 16) {
#pragma unroll
            for (int part = 0; part < kValueBytes / 16; ++part) {
                const uint4 bits = __ldg(reinterpret_cast<const uint4*>(source) + part);
                values[4 * part] = bits.x;
                values[4 * part + 1] = bits.y;
                values[4 * part + 2] = bits.z;
                values[4 * part + 3] = bits.w;
            }
        } else if constexpr (kValueBytes == 8) {
            const uint2 bits = __ldg(reinterpret_cast<const uint2*>(source));
            values[0] = bits.x;
            values[1] = bits.y;
        } else if constexpr (kValueBytes == 4) {
            values[0] = __ldg(reinterpret_cast<const Word*>(source));
        } else {
            values[0] = __ldg(reinterpret_cast<const unsigned short*>(source));
        }
    }

    // Returns `start` plus the first `count` deltas: the column of entry count - 1, if `start` is the column before the load.
    // `count` is constant once the caller's loop is unrolled, so the masks cost nothing.
    __device__ __forceinline__ Word column_after(Word start, int count) const {
        if constexpr (DELTA_BITS == 8) {
            return add_bytes(deltas, count, start);
        } else {
            // Even deltas are in the low halves of the bytes, odd ones in the high halves.
            start = add_bytes(deltas & 0x0f0f0f0fu, (count + 1) / 2, start);
            return add_bytes(deltas >> 4 & 0x0f0f0f0fu, count / 2, start);
        }
    }

    // Returns `start` plus the lowest `count` bytes of `bytes`, 0 to 4: a dot product with as many ones.
    static __device__ __forceinline__ Word add_bytes(Word bytes, int count, Word start) {
        return count == 0 ? start : __dp4a(bytes, 0x01010101u >> 8 * (4 - count), start);
    }
};

// The loads of one bundle, the block of rows that one warp reads. They are interleaved by lane: load `index` of lane `lane` is
// the bundle's load 32 * index + lane.
template <int ROWS, int VECTOR>
struct BundleLoads {
    const char* values;
    const unsigned char* deltas;

    // Begins at value `first_value` of all values, and at delta `first_delta` of all deltas, a multiple of 32.
    __device__ __forceinline__ BundleLoads(
        const SCALAR* all_values, const unsigned char* all_deltas, long long first_value, long long first_delta
    )
        : values(reinterpret_cast<const char*>(all_values + first_value)), deltas(all_deltas + first_delta * DELTA_BITS / 8) {}

    // Returns the `index`-th load of a lane.
    __device__ __forceinline__ LaneLoad<ROWS, VECTOR> get(int index, int lane) const {
        LaneLoad<ROWS, VECTOR> load;
        const int load_index = index * kWarp + lane;
        load.read_values(values + (long long)load_index * load.kValueBytes);
        if constexpr (load.kDeltaBits == 32) {
            load.deltas = __ldcs(reinterpret_cast<const Word*>(deltas) + load_index);
        } else if constexpr (load.kDeltaBits == 16) {
            load.deltas = __ldcs(reinterpret_cast<const unsigned short*>(deltas) + load_index);
        } else if constexpr (load.kDeltaBits == 8) {
            load.deltas = __ldcs(deltas + load_index);
        } else {
            // One delta of 4 bits: two lanes share a byte, the even one has its low half.
            load.deltas = (__ldcs(deltas + load_index / 2) >> (4 * (load_index % 2))) & 15;
        }
        return load;
    }
};
