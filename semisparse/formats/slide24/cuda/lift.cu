// Quantises each token to 8 bits at its own scale and lifts it (SlideSparse, algorithm 1 and equation 4), or lifts it only:
//   lifted[token, 4 j + i] = quantised(x[token, 2N (j / (N - 1)) + 2 (j % (N - 1)) + i])   for window j, i = 0 to 3
// N is half of the pattern's `window`. Each value is quantised once. A *pair* is two columns of x, so a group has N pairs. A
// window is two consecutive pairs of a group: each of its pairs but the last begins one.
//
// Grid:    a CTA per token along x, 64 to 640 threads.
// Shared:  dynamic: the lifted token, units * 16 bytes. Static: a maximum per warp (quantise.cuh).
// Threads: thread t loads vectors t, t + threads, ... of eight columns, once to find the largest magnitude and again to round; the
//          first VECTORS of them are loaded once, to registers. It stores the windows that its pairs begin to shared memory, from
//          which the CTA stores 16-byte units, in the order of the layout `tiles` (README.md, "Layouts on a GPU").
//
// Bound:   not memory bandwidth. 4,096 tokens to int8 take 16.7 us at 3,584 columns (their bytes at full bandwidth 12, quantising
//          without lifting 13.4) and 84.7 us at 18,944 (63, 79.8). Lifting without quantising takes as long (H200,
//          results/h200/sweeps/slide24-lift.csv).
//
// Macros: IN (type of x); QUANTISE 0 (no), 1 (int8) or 2 (fp8 e4m3); VECTORS.

#include "ptx/cvt.cuh"
#include "ptx/global.cuh"
#include "quantise.cuh"
#include "types.cuh"

namespace {

constexpr int kColumns = 8, kPairs = 4;  // per vector
#if QUANTISE
using Window = Word;
#else
using Window = uint2;
#endif

struct Token {
    const IN* x;
    int columns, vectors;
};

struct alignas(16) Vector {
    Word pairs[kPairs];
};

template <bool ALIGNED>
__device__ __forceinline__ Word load_pair(const Token& token, int column) {
    if (ALIGNED) return column < token.columns ? *reinterpret_cast<const Word*>(token.x + column) : 0;
    const IN zero = IN(0.0f);
    const IN both[2] = {column < token.columns ? token.x[column] : zero,
                        column + 1 < token.columns ? token.x[column + 1] : zero};
    return *reinterpret_cast<const unsigned short*>(both) | *reinterpret_cast<const unsigned short*>(both + 1) << 16;
}

// The eight columns from 8 * `number` on; those past K are zeros.
template <bool ALIGNED>
__device__ __forceinline__ Vector load_vector(const Token& token, int number) {
    Vector vector = {{0, 0, 0, 0}};
    if (number >= token.vectors) return vector;
    if (ALIGNED) {
        *reinterpret_cast<uint4*>(&vector) = ld_global_nc_v4(token.x + number * kColumns);
    } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) vector.pairs[i] = load_pair<false>(token, number * kColumns + 2 * i);
    }
    return vector;
}

__device__ __forceinline__ float low(Word pair) {
    const unsigned short bits = pair & 0xffff;
    return to_float(*reinterpret_cast<const IN*>(&bits));
}

__device__ __forceinline__ float high(Word pair) { return low(pair >> 16); }

#if QUANTISE
constexpr float kLargest = QUANTISE == 1 ? 127.0f : 448.0f;

// The larger of `largest` and the vector's magnitudes, as 16-bit patterns, in each half of a word.
__device__ __forceinline__ Word max_of(const Vector& vector, Word largest) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = __vmaxu2(largest, vector.pairs[i] & 0x7fff7fff);
    return largest;
}

// Two quantised columns in the low two bytes; the upper bytes are undefined. The multiplication is rounded before the addition,
// as torch does.
__device__ __forceinline__ Word quantised(Word pair, float inverse) {
    const float first = __fmul_rn(low(pair), inverse), second = __fmul_rn(high(pair), inverse);
#if QUANTISE == 1
    return __byte_perm(__float_as_uint(__fadd_rn(first, kMagic)), __float_as_uint(__fadd_rn(second, kMagic)), 0x0040);
#else
    return cvt_e4m3x2(first, second);
#endif
}

__device__ __forceinline__ Window window_of(Word first, Word second) { return __byte_perm(first, second, 0x5410); }
#else
__device__ __forceinline__ Word quantised(Word pair, float) { return pair; }
__device__ __forceinline__ Window window_of(Word first, Word second) { return make_uint2(first, second); }
#endif

struct Lifting {
    int windows, group_pairs;  // per token; per group, N
    Word reciprocal;           // 2^32 / group_pairs, rounded up: __umulhi(i, reciprocal) is i / group_pairs
    float inverse;             // 1 / scale
};

// Stores the windows that a vector's pairs begin. `next` is the pair after the vector; only the warp's last lane needs it. All
// lanes must take part.
__device__ __forceinline__ void store_windows(Window* windows, const Vector& vector, Word next, int number,
                                              const Lifting& lifting) {
    Word pairs[kPairs + 1];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = quantised(vector.pairs[i], lifting.inverse);
    if (kPairs % lifting.group_pairs) {
        pairs[kPairs] = __shfl_down_sync(~0u, pairs[0], 1);
        if (threadIdx.x % 32 == 31) pairs[kPairs] = quantised(next, lifting.inverse);
    } else {
        pairs[kPairs] = 0;  // it begins a group, so no window of this vector holds it
    }
    int window = number * kPairs - __umulhi(number * kPairs, lifting.reciprocal);
    int in_group = number * kPairs - __umulhi(number * kPairs, lifting.reciprocal) * lifting.group_pairs;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const bool begins = in_group + 1 < lifting.group_pairs;
        if (begins && window < lifting.windows) windows[window] = window_of(pairs[i], pairs[i + 1]);
        window += begins;
        in_group = begins ? in_group + 1 : 0;
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void lift_token(const Token& token, Lifting lifting, Window* windows, float* scale) {
    // Number of vectors that hold pairs of windows, zeros past K included: the last window ends with the pair
    // last + last / (group_pairs - 1) + 1.
    const int last = lifting.windows - 1;
    const int lane = threadIdx.x % 32, vectors = (last + last / (lifting.group_pairs - 1) + 5) / kPairs;
    const bool needs_next = lane == 31 && kPairs % lifting.group_pairs;
    Vector kept[VECTORS];
    Word next[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        kept[i] = load_vector<ALIGNED>(token, number);
        next[i] = needs_next ? load_pair<ALIGNED>(token, (number + 1) * kColumns) : 0;
    }
#if QUANTISE
    Word both = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) both = max_of(kept[i], both);
    for (int number = threadIdx.x + VECTORS * blockDim.x; number < token.vectors; number += blockDim.x)
        both = max_of(load_vector<ALIGNED>(token, number), both);
    const float amax = cta_reduce_max(max(abs_bits(low(both)), abs_bits(high(both))));
    const float largest = amax == 0 ? kLargest : amax;
    lifting.inverse = fminf(__fdiv_rn(kLargest, largest), kFloatMax);
    if (threadIdx.x == 0) *scale = __fdiv_rn(largest, kLargest);
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        if (number - lane < vectors) store_windows(windows, kept[i], next[i], number, lifting);
    }
    for (int number = threadIdx.x + VECTORS * blockDim.x; number - lane < vectors; number += blockDim.x) {
        const Word after = needs_next ? load_pair<ALIGNED>(token, (number + 1) * kColumns) : 0;
        store_windows(windows, load_vector<ALIGNED>(token, number), after, number, lifting);
    }
}

}  // namespace

extern __shared__ uint4 shared[];

// x: [M, columns]; lifted: 16 * units bytes per token, for `tokens` >= M tokens, of which M are written; scales: [M], null
// without QUANTISE; arrivals: `count` counters of gemm.cu, set to 0.
extern "C" __global__ void semisparse_slide24_lift(const IN* x, uint4* lifted, float* scales, int* arrivals, int columns,
                                                   int group_pairs, int tokens, int units, int count, Word reciprocal) {
    const int number = blockIdx.x;
    const Token token = {x + static_cast<long long>(number) * columns, columns, (columns + kColumns - 1) / kColumns};
    const Lifting lifting = {static_cast<int>(units * (16 / sizeof(Window))), group_pairs, reciprocal, 1.0f};
    Window* windows = reinterpret_cast<Window*>(shared);
    if (number == 0)
        for (int i = threadIdx.x; i < count; i += blockDim.x) arrivals[i] = 0;
    if (columns % kColumns == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0)
        lift_token<true>(token, lifting, windows, scales + number);
    else
        lift_token<false>(token, lifting, windows, scales + number);
    __syncthreads();
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        const long long to = (static_cast<long long>(unit / 8) * tokens + number) * 8 + (unit % 8 ^ number % 8);
        lifted[to] = shared[unit];
    }
}
