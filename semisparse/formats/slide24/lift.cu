// Rounding a token to 8 bits at its own scale, and repeating columns as the windows overlap (SlideSparse, algorithm 1 and
// equation 4): one thread block a token, x read once, each value rounded once.
//
// Two columns are a *pair*. A window is two pairs that follow each other; window w begins with pair w + w / WINDOWS: one further
// for each window before it, and one more for each whole group. So the rounded row lies in shared memory as pairs, and 16 bytes
// of the result, a *unit*, are picked from it by pairs.
//
// Macros: IN (type of x); ROUNDED 0 (pairs as they are), 1 (int8) or 2 (fp8 e4m3); KEEP, the loads of eight columns that a thread
// keeps in registers between the search for the largest and the rounding; what does not fit is read a second time.

#include "rounding.cuh"
#include "scalars.cuh"

namespace {

constexpr int kColumns = 8;  // of a load
#if ROUNDED
using Pair = unsigned short;
#else
using Pair = unsigned int;
#endif

constexpr int kPairs = 16 / sizeof(Pair);  // of a unit

struct alignas(16) Load {
    IN values[kColumns];
};

// Reads columns 8 * `number` and on; those past the last are zeros.
__device__ __forceinline__ Load read(const IN* row, int number, int columns, bool aligned) {
    Load found;
    const int first = number * kColumns;
    if (aligned && first + kColumns <= columns) {
        *reinterpret_cast<uint4*>(&found) = *reinterpret_cast<const uint4*>(row + first);
    } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) found.values[i] = first + i < columns ? row[first + i] : IN(0.0f);
    }
    return found;
}

#if ROUNDED
constexpr float kLargest = ROUNDED == 1 ? 127.0f : 448.0f;

__device__ __forceinline__ unsigned int largest_of(const Load& load, unsigned int largest) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) largest = max(largest, magnitude(to_float(load.values[i])));
    return largest;
}

// Rounds two columns to the low two bytes; other bits may be anything.
__device__ __forceinline__ unsigned int rounded_pair(float first, float second) {
#if ROUNDED == 1
    return __float_as_uint(__fadd_rn(first, kMagic)) & 255 | __float_as_uint(__fadd_rn(second, kMagic)) << 8;
#else
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
#endif
}

// Rounds eight columns. Products are rounded before the sum, as torch does.
__device__ __forceinline__ uint2 rounded(const Load& load, float inverse) {
    unsigned int pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
        pairs[i] = rounded_pair(__fmul_rn(to_float(load.values[2 * i]), inverse),
                                __fmul_rn(to_float(load.values[2 * i + 1]), inverse));
    return make_uint2(pairs[0] & 0xffff | pairs[1] << 16, pairs[2] & 0xffff | pairs[3] << 16);
}
#endif

// Writes every unit of a token to its place in tiles (tiles.py). `pairs` is its row in shared memory, `over` 2^32 / WINDOWS,
// rounded up.
__device__ __forceinline__ void write_units(const Pair* pairs, uint4* lifted, int token, int tokens, int units,
                                            unsigned long long over) {
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        alignas(16) Pair found[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
            const unsigned int window = (unit * kPairs + i) / 2;
            const unsigned int first = window + static_cast<unsigned int>(window * over >> 32);
            found[i] = pairs[first], found[i + 1] = pairs[first + 1];
        }
        const long long place = (static_cast<long long>(unit / 8) * tokens + token) * 8 + (unit % 8 ^ token % 8);
        lifted[place] = *reinterpret_cast<const uint4*>(found);
    }
}

}  // namespace

extern __shared__ uint4 shared[];

// x is [M, columns], lifted 16 * units bytes for each of `tokens` in tiles, scales [M]; `room` is of shared memory, in
// pairs. The product that follows counts in `counters`: they are set to 0.
extern "C" __global__ void semisparse_lift(const IN* x, uint4* lifted, float* scales, int* counters, int columns, int room,
                                           int tokens, int units, int count, unsigned long long over) {
    const int token = blockIdx.x, loads = (columns + kColumns - 1) / kColumns;
    const IN* row = x + static_cast<long long>(token) * columns;
    const bool aligned = columns % kColumns == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0;
    Pair* pairs = reinterpret_cast<Pair*>(shared);
    if (token == 0)
        for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
    for (int pair = loads * (kColumns / 2) + threadIdx.x; pair < room; pair += blockDim.x) pairs[pair] = 0;
#if ROUNDED
    Load kept[KEEP];
    unsigned int bits = 0;
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        if (number < loads) kept[i] = read(row, number, columns, aligned);
    }
#pragma unroll
    for (int i = 0; i < KEEP; ++i)
        if (threadIdx.x + i * blockDim.x < loads) bits = largest_of(kept[i], bits);
    for (int number = threadIdx.x + KEEP * blockDim.x; number < loads; number += blockDim.x)
        bits = largest_of(read(row, number, columns, aligned), bits);
    float largest = largest_of_block(bits);
    largest = largest == 0 ? kLargest : largest;
    const float inverse = fminf(__fdiv_rn(kLargest, largest), kFloatMax);
    if (threadIdx.x == 0) scales[token] = __fdiv_rn(largest, kLargest);
    uint2* octets = reinterpret_cast<uint2*>(shared);
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        if (number < loads) octets[number] = rounded(kept[i], inverse);
    }
    for (int number = threadIdx.x + KEEP * blockDim.x; number < loads; number += blockDim.x)
        octets[number] = rounded(read(row, number, columns, aligned), inverse);
#else
    for (int number = threadIdx.x; number < loads; number += blockDim.x)
        reinterpret_cast<Load*>(shared)[number] = read(row, number, columns, aligned);
#endif
    __syncthreads();
    write_units(pairs, lifted, token, tokens, units, over);
}
