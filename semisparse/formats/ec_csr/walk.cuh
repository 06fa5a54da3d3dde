// How a lane walks its list of columns: loads ahead of use, delta sums by dp4a, products in float32.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float: x, w, bias and y), TOKENS (of one pass), DELTA_BITS (4 or 8) and
// AHEAD (loads that are under way while one is used).

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Word = unsigned int;

constexpr int kWarp = 32;
constexpr Word kAllLanes = 0xffffffffu;

struct Bundle {
    int granularity, vector, columns, first_delta, first_value, first_slot;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(float* place, float value) { *place = value; }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }

template <int BYTES>
struct alignas(BYTES < 16 ? BYTES : 16) Bytes {
    SCALAR values[BYTES / sizeof(SCALAR)];
};

// 16 bytes that are read once: kept out of the first-level cache.
__device__ __forceinline__ uint4 stream(const void* place) {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(place));
    return got;
}

// What a lane loads at a time: VECTOR columns' deltas and the values of ROWS rows in each.
template <int ROWS, int VECTOR>
struct Load {
    static constexpr int kBytes = ROWS * VECTOR * (int)sizeof(SCALAR);
    static constexpr int kBits = VECTOR * DELTA_BITS;
    static constexpr int kWords = kBits > 32 ? kBits / 32 : 1;

    Bytes<kBytes> values;
    Word deltas[kWords];

    __device__ __forceinline__ void fetch(const SCALAR* first_value, const unsigned char* first_delta, int index, int lane) {
        const int place = index * kWarp + lane;
        const char* from = reinterpret_cast<const char*>(first_value) + (long long)place * kBytes;
        if constexpr (kBytes == 16) {
            *reinterpret_cast<uint4*>(&values) = stream(from);
        } else {
            values = *reinterpret_cast<const Bytes<kBytes>*>(from);
        }
        if constexpr (kBits == 64) {
            const uint2 both = __ldcs(reinterpret_cast<const uint2*>(first_delta) + place);
            deltas[0] = both.x;
            deltas[1] = both.y;
        } else if constexpr (kBits == 32) {
            deltas[0] = __ldcs(reinterpret_cast<const Word*>(first_delta) + place);
        } else if constexpr (kBits == 16) {
            deltas[0] = __ldcs(reinterpret_cast<const unsigned short*>(first_delta) + place);
        } else if constexpr (kBits == 8) {
            deltas[0] = __ldcs(first_delta + place);
        } else {
            deltas[0] = __ldcs(first_delta + place / 2) >> 4 * (place % 2) & 15;
        }
    }

    // Sum of the first `count` of this load's deltas, UNIT each, on top of `start`; all constants after unrolling.
    template <int UNIT>
    __device__ __forceinline__ Word place_of(Word start, int count) const {
        constexpr int kPerWord = DELTA_BITS == 8 ? 4 : 8;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            const int here = min(max(count - word * kPerWord, 0), kPerWord);
            if constexpr (DELTA_BITS == 8) {
                start = add_bytes<UNIT>(deltas[word], here, start);
            } else {
                start = add_bytes<UNIT>(deltas[word] & 0x0f0f0f0fu, (here + 1) / 2, start);
                start = add_bytes<UNIT>(deltas[word] >> 4 & 0x0f0f0f0fu, here / 2, start);
            }
        }
        return start;
    }

    template <int UNIT>
    static __device__ __forceinline__ Word add_bytes(Word bytes, int count, Word start) {
        static_assert(UNIT < 256, "a byte of dp4a's factor");
        return count == 0 ? start : __dp4a(bytes, 0x01010101u * UNIT >> 8 * (4 - count), start);
    }
};

// Walks one lane's list. X says how x is read: X::kUnit bytes a column, and get(offset, out) reads TOKENS values.
template <int ROWS, int VECTOR, class X>
struct Walk {
    Load<ROWS, VECTOR> ring[AHEAD];
    const SCALAR* values;
    const unsigned char* deltas;
    int loads, lane;

    __device__ __forceinline__ Walk(const Bundle& bundle, const SCALAR* all_values, const unsigned char* all_deltas, int lane)
        : values(all_values + bundle.first_value),
          deltas(all_deltas + (DELTA_BITS == 8 ? bundle.first_delta : bundle.first_delta / 2)),
          loads(bundle.columns / VECTOR),
          lane(lane) {
#pragma unroll
        for (int at = 0; at < AHEAD; ++at) {
            if (at < loads) ring[at].fetch(values, deltas, at, lane);
        }
    }

    __device__ __forceinline__ void run(Word column, const X& x, float (&sums)[ROWS][TOKENS]) {
        Word offset = column * X::kUnit;
        for (int first = 0; first < loads; first += AHEAD) {
#pragma unroll
            for (int at = 0; at < AHEAD; ++at) {
                if (first + at < loads) {
                    const Load<ROWS, VECTOR> now = ring[at];
                    if (first + at + AHEAD < loads) ring[at].fetch(values, deltas, first + at + AHEAD, lane);
                    offset = use(now, offset, x, sums);
                }
            }
        }
    }

    static __device__ __forceinline__ Word use(
        const Load<ROWS, VECTOR>& now, Word offset, const X& x, float (&sums)[ROWS][TOKENS]
    ) {
#pragma unroll
        for (int step = 0; step < VECTOR; ++step) {
            float features[TOKENS];
            x.get(now.template place_of<X::kUnit>(offset, step + 1), features);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float weight = to_float(now.values.values[step * ROWS + row]);
#pragma unroll
                for (int token = 0; token < TOKENS; ++token) sums[row][token] += weight * features[token];
            }
        }
        return now.template place_of<X::kUnit>(offset, VECTOR);
    }
};
