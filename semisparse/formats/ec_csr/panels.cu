// y[m, n] = sum_k x[m, k] * w[n, k] for an ec_csr weight in the layout `panels`, TOKENS tokens at a time.
//
// A thread block computes the 32 rows of a panel. x lies in shared memory, the tokens of a column side by side. Each warp
// takes a bundle at a time; each lane walks a block of its own, so that sums need no shuffles: they go to the slots that
// the packer gave them, and the slots of a row are added in order. Every run gives the same bits.
//
// Compiled for SCALAR, TOKENS, DELTA_BITS, AHEAD (walk.cuh), COARSEST (the most rows of a block), INDEX (unsigned short or
// unsigned int, of base columns), WARPS and BLOCKS (thread blocks that shall fit a processor).

#include "walk.cuh"

constexpr int kPanelRows = 32;
constexpr int kNoSlot = 0xffff;
constexpr int kThreads = WARPS * kWarp;

template <int COUNT>
struct alignas(COUNT * sizeof(SCALAR) < 16 ? COUNT * sizeof(SCALAR) : 16) Tokens {
    SCALAR values[COUNT];
};

// One token is widened once, on its way to shared memory; more keep their 16 bits, to fit.
#if TOKENS == 1
using Feature = float;
#else
using Feature = Tokens<TOKENS>;
#endif

struct SharedX {
    static constexpr int kUnit = sizeof(Feature);
    const Feature* features;

    __device__ __forceinline__ void get(Word offset, float (&out)[TOKENS]) const {
        const Feature found = *reinterpret_cast<const Feature*>(reinterpret_cast<const char*>(features) + offset);
#if TOKENS == 1
        out[0] = found;
#else
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) out[token] = to_float(found.values[token]);
#endif
    }
};

constexpr int kVector = 16 / sizeof(SCALAR);

// Where the tokens of this thread block begin; those past m repeat the last one and are not stored.
struct Tokenwise {
    const SCALAR* x;
    int first, m, k;

    __device__ __forceinline__ const SCALAR* row(int token) const { return x + (long long)min(first + token, m - 1) * k; }

    // 16-byte loads of x, if its row allows them and there is one token to widen; the rest goes element by element.
    __device__ __forceinline__ int vectors() const {
        return TOKENS == 1 && k % kVector == 0 && reinterpret_cast<unsigned long long>(row(0)) % 16 == 0 ? k / kVector : 0;
    }
};

__device__ __forceinline__ void widen(Feature* features, int at, const uint4& bits) {
#if TOKENS == 1
    const SCALAR* values = reinterpret_cast<const SCALAR*>(&bits);
#pragma unroll
    for (int part = 0; part < kVector; ++part) features[at * kVector + part] = to_float(values[part]);
#endif
}

// Writes all of x but each thread's first vector, which it has asked for before anything else and stores last.
__device__ __forceinline__ void stage(Feature* features, const Tokenwise& x, int vectors, const uint4& early) {
    for (int at = threadIdx.x + kThreads; at < vectors; at += kThreads) {
        widen(features, at, __ldg(reinterpret_cast<const uint4*>(x.row(0)) + at));
    }
    for (int column = vectors * kVector + threadIdx.x; column < x.k; column += kThreads) {
#if TOKENS == 1
        features[column] = to_float(x.row(0)[column]);
#else
        Feature found;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) found.values[token] = x.row(token)[column];
        features[column] = found;
#endif
    }
    if (threadIdx.x < vectors) widen(features, threadIdx.x, early);
}

struct Weight {
    const SCALAR* values;
    const unsigned char* deltas;
    const INDEX* bases;
    const Bundle* bundles;
    const unsigned short* slots;
};

// One lane's block: what it needs from memory is asked for when this is made.
template <int GRANULARITY>
struct Lane {
    static constexpr int kColumns = 16 / (GRANULARITY * (int)sizeof(SCALAR)) > 1 ? 16 / (GRANULARITY * (int)sizeof(SCALAR)) : 1;

    Walk<GRANULARITY, kColumns, SharedX> walk;
    Word base;
    int slots[GRANULARITY];

    __device__ __forceinline__ Lane(const Weight& w, const Bundle& bundle, int number, int lane)
        : walk(bundle, w.values, w.deltas, lane), base(w.bases[number * kWarp + lane]) {
#pragma unroll
        for (int row = 0; row < GRANULARITY; ++row) {
            slots[row] = bundle.columns ? w.slots[bundle.first_slot + lane * GRANULARITY + row] : kNoSlot;
        }
    }

    __device__ __forceinline__ void finish(const SharedX& x, float* partial) {
        float sums[GRANULARITY][TOKENS] = {};
        walk.run(base, x, sums);
#pragma unroll
        for (int row = 0; row < GRANULARITY; ++row) {
            if (slots[row] == kNoSlot) continue;
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) partial[slots[row] * TOKENS + token] = sums[row][token];
        }
    }
};

__device__ __forceinline__ void compute(const Weight& w, int number, const SharedX& x, float* partial, int lane) {
    const Bundle bundle = w.bundles[number];
#if COARSEST >= 4
    if (bundle.granularity == 4) return Lane<4>(w, bundle, number, lane).finish(x, partial);
#endif
#if COARSEST >= 2
    if (bundle.granularity == 2) return Lane<2>(w, bundle, number, lane).finish(x, partial);
#endif
    Lane<1>(w, bundle, number, lane).finish(x, partial);
}

// Adds the slots of each row in order: a warp a row, a lane every 32nd slot, then pairs of lanes.
__device__ __forceinline__ void add_slots(
    const float* partial, const int* starts, const SCALAR* bias, SCALAR* y, int first, int m, int n, int warp, int lane
) {
    const int top = blockIdx.x * kPanelRows;
    for (int row = warp; row < min(kPanelRows, n - top); row += WARPS) {
        float sums[TOKENS] = {};
        for (int slot = starts[row] - starts[0] + lane; slot < starts[row + 1] - starts[0]; slot += kWarp) {
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) sums[token] += partial[slot * TOKENS + token];
        }
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
            for (int step = kWarp / 2; step > 0; step /= 2) sums[token] += __shfl_xor_sync(kAllLanes, sums[token], step);
            if (lane == 0 && first + token < m) {
                const float added = bias ? to_float(bias[top + row]) : 0.0f;
                store(y + (long long)(first + token) * n + top + row, sums[token] + added);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_ec_csr_panels(
    const SCALAR* __restrict__ x,              // [m, k]
    const SCALAR* __restrict__ values,         // [values]
    const unsigned char* __restrict__ deltas,  // [deltas * DELTA_BITS / 8]
    const INDEX* __restrict__ bases,           // [panels, panel_bundles, 32]
    const Bundle* __restrict__ bundles,        // [panels, panel_bundles]
    const unsigned short* __restrict__ slots,  // [slots]
    const int* __restrict__ row_slots,         // [n + 1]
    const SCALAR* __restrict__ bias,           // [n] or null
    SCALAR* __restrict__ y,                    // [m, n]
    int m, int n, int k, int panel_bundles
) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int starts[kPanelRows + 1];
    Feature* features = reinterpret_cast<Feature*>(shared);
    float* partial = reinterpret_cast<float*>(shared + ((size_t)k * sizeof(Feature) + 15) / 16 * 16);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int begin = blockIdx.x * panel_bundles, end = begin + panel_bundles;
    int number = begin + warp;
    const Weight w{values, deltas, bases, bundles, slots};
    const SharedX staged{features};
    const Tokenwise tokens{x, (int)blockIdx.y * TOKENS, m, k};
    const int vectors = tokens.vectors();
    uint4 early = {};
    if (threadIdx.x < vectors) early = __ldg(reinterpret_cast<const uint4*>(tokens.row(0)) + threadIdx.x);
    if (threadIdx.x <= kPanelRows) starts[threadIdx.x] = row_slots[min((int)(blockIdx.x * kPanelRows + threadIdx.x), n)];
#if COARSEST == 1
    // The loads of the first bundle are under way while x is staged.
    if (number < end) {
        Lane<1> own(w, bundles[number], number, lane);
        stage(features, tokens, vectors, early);
        __syncthreads();
        own.finish(staged, partial);
        number += WARPS;
    } else {
        stage(features, tokens, vectors, early);
        __syncthreads();
    }
#else
    stage(features, tokens, vectors, early);
    __syncthreads();
#endif
    for (; number < end; number += WARPS) compute(w, number, staged, partial, lane);
    __syncthreads();
    add_slots(partial, starts, bias, y, tokens.first, m, n, warp, lane);
}
