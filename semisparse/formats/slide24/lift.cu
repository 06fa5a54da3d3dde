// Rounding a token to 8 bits at its own scale, and repeating columns as the windows overlap (SlideSparse, algorithm 1 and
// equation 4): one thread block a token, x read once, each value rounded once.
//
// Two columns are a *pair*. A window is two pairs that follow each other; of the GAP pairs of a group all but the last begin one.
// A thread takes four pairs at a time and puts the windows that they begin where these stand in the lifted row, which lies in
// shared memory and leaves it 16 bytes, a *unit*, at a time.
//
// Macros: IN (type of x); ROUNDED 0 (pairs as they are), 1 (int8) or 2 (fp8 e4m3); KEEP, the loads of eight columns that a thread
// keeps in registers between the search for the largest and the rounding; what does not fit is read a second time.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/cvt.cuh"
#include "quantise.cuh"
#include "types.cuh"

namespace {

constexpr int kColumns = 8, kPairs = 4;  // of a load
#if ROUNDED
using Window = Word;
#else
using Window = uint2;
#endif

struct Row {
    const IN* x;
    int columns, loads;  // loads: of x, those before the first that is nothing but zeros
};

struct alignas(16) Load {
    Word pairs[kPairs];
};

template <bool ALIGNED>
__device__ __forceinline__ Word read_pair(const Row& row, int column) {
    if (ALIGNED) return column < row.columns ? *reinterpret_cast<const Word*>(row.x + column) : 0;
    const IN none = IN(0.0f);
    const IN both[2] = {column < row.columns ? row.x[column] : none, column + 1 < row.columns ? row.x[column + 1] : none};
    return *reinterpret_cast<const unsigned short*>(both) | *reinterpret_cast<const unsigned short*>(both + 1) << 16;
}

// Reads columns 8 * `number` and on; those past the last are zeros.
template <bool ALIGNED>
__device__ __forceinline__ Load read(const Row& row, int number) {
    Load found = {{0, 0, 0, 0}};
    if (number >= row.loads) return found;
    if (ALIGNED) {
        *reinterpret_cast<uint4*>(&found) = ld_global_nc_v4(row.x + number * kColumns);
    } else {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) found.pairs[i] = read_pair<false>(row, number * kColumns + 2 * i);
    }
    return found;
}

__device__ __forceinline__ float low(Word pair) {
    const unsigned short bits = pair & 0xffff;
    return to_float(*reinterpret_cast<const IN*>(&bits));
}

__device__ __forceinline__ float high(Word pair) { return low(pair >> 16); }

#if ROUNDED
constexpr float kLargest = ROUNDED == 1 ? 127.0f : 448.0f;

// Of each half the largest magnitude yet, by its bits.
__device__ __forceinline__ Word largest_of(const Load& load, Word largest) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = __vmaxu2(largest, load.pairs[i] & 0x7fff7fff);
    return largest;
}

// Rounds two columns to the low two bytes; other bits may be anything. Products are rounded before the sum, as torch does.
__device__ __forceinline__ Word rounded(Word pair, float inverse) {
    const float first = __fmul_rn(low(pair), inverse), second = __fmul_rn(high(pair), inverse);
#if ROUNDED == 1
    return __byte_perm(__float_as_uint(__fadd_rn(first, kMagic)), __float_as_uint(__fadd_rn(second, kMagic)), 0x0040);
#else
    return cvt_e4m3x2(first, second);
#endif
}

__device__ __forceinline__ Window window_of(Word first, Word second) { return __byte_perm(first, second, 0x5410); }
#else
__device__ __forceinline__ Word rounded(Word pair, float) { return pair; }
__device__ __forceinline__ Window window_of(Word first, Word second) { return make_uint2(first, second); }
#endif

// How a row is lifted: `windows` of it, `gap` pairs a group, `over` 2^32 / gap, rounded up.
struct Lifting {
    int windows, gap;
    Word over;
    float inverse;
};

// Puts the windows that a load's pairs begin; `next` is the pair after them, of the warp's last lane. All lanes are here.
__device__ __forceinline__ void put(Window* windows, const Load& load, Word next, int number, const Lifting& lifting) {
    Word pairs[kPairs + 1];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = rounded(load.pairs[i], lifting.inverse);
    if (kPairs % lifting.gap) {
        pairs[kPairs] = __shfl_down_sync(~0u, pairs[0], 1);
        if (threadIdx.x % 32 == 31) pairs[kPairs] = rounded(next, lifting.inverse);
    } else {
        pairs[kPairs] = 0;  // it begins a group
    }
    int window = number * kPairs - __umulhi(number * kPairs, lifting.over);
    int place = number * kPairs - __umulhi(number * kPairs, lifting.over) * lifting.gap;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const bool begins = place + 1 < lifting.gap;
        if (begins && window < lifting.windows) windows[window] = window_of(pairs[i], pairs[i + 1]);
        window += begins;
        place = begins ? place + 1 : 0;
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void lift_row(const Row& row, Lifting lifting, Window* windows, float* scale) {
    const int lane = threadIdx.x % 32, reads = ((lifting.windows - 1) + (lifting.windows - 1) / (lifting.gap - 1) + 5) / kPairs;
    const bool alone = lane == 31 && kPairs % lifting.gap;  // the warp's last lane reads the pair after its own
    Load kept[KEEP];
    Word next[KEEP];
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        kept[i] = read<ALIGNED>(row, number);
        next[i] = alone ? read_pair<ALIGNED>(row, (number + 1) * kColumns) : 0;
    }
#if ROUNDED
    Word both = 0;
#pragma unroll
    for (int i = 0; i < KEEP; ++i) both = largest_of(kept[i], both);
    for (int number = threadIdx.x + KEEP * blockDim.x; number < row.loads; number += blockDim.x)
        both = largest_of(read<ALIGNED>(row, number), both);
    const float found = cta_reduce_max(max(abs_bits(low(both)), abs_bits(high(both))));
    const float largest = found == 0 ? kLargest : found;
    lifting.inverse = fminf(__fdiv_rn(kLargest, largest), kFloatMax);
    if (threadIdx.x == 0) *scale = __fdiv_rn(largest, kLargest);
#endif
#pragma unroll
    for (int i = 0; i < KEEP; ++i) {
        const int number = threadIdx.x + i * blockDim.x;
        if (number - lane < reads) put(windows, kept[i], next[i], number, lifting);
    }
    for (int number = threadIdx.x + KEEP * blockDim.x; number - lane < reads; number += blockDim.x) {
        const Word after = alone ? read_pair<ALIGNED>(row, (number + 1) * kColumns) : 0;
        put(windows, read<ALIGNED>(row, number), after, number, lifting);
    }
}

}  // namespace

extern __shared__ uint4 shared[];

// x is [M, columns], lifted 16 * units bytes for each of `tokens` in tiles (tiles.py), scales [M]. The product that follows counts
// in `counters`: they are set to 0.
extern "C" __global__ void semisparse_lift(const IN* x, uint4* lifted, float* scales, int* counters, int columns, int gap,
                                           int tokens, int units, int count, Word over) {
    const int token = blockIdx.x;
    const Row row = {x + static_cast<long long>(token) * columns, columns, (columns + kColumns - 1) / kColumns};
    const Lifting lifting = {static_cast<int>(units * (16 / sizeof(Window))), gap, over, 1.0f};
    Window* windows = reinterpret_cast<Window*>(shared);
    if (token == 0)
        for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
    if (columns % kColumns == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0)
        lift_row<true>(row, lifting, windows, scales + token);
    else
        lift_row<false>(row, lifting, windows, scales + token);
    __syncthreads();
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        const long long place = (static_cast<long long>(unit / 8) * tokens + token) * 8 + (unit % 8 ^ token % 8);
        lifted[place] = shared[unit];
    }
}
