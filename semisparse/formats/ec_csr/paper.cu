// y[m, n] = sum_k x[m, k] * w[n, k] for an ec_csr weight in the layout `paper`, TOKENS tokens at a time (section 7).
//
// A warp computes a block; its lanes walk a contiguous part each, read x where it lies, and add their sums by shuffles.
// Where the paper adds to y atomically, each block's sums go to slots of their own, and a second kernel adds those of each
// row in order: every run gives the same bits.
//
// Compiled for SCALAR, TOKENS, DELTA_BITS (load.cuh), COARSEST (the most rows of a block), INDEX (unsigned short or
// unsigned int, of base columns) and WARPS.

#include "load.cuh"

struct Bundle {
    int granularity, vector, columns, first_delta, first_value, first_slot;
};

struct Operands {
    const SCALAR* x[TOKENS];
    const SCALAR* values;
    const unsigned char* deltas;
    const int* slots;
    float* partial;
};

template <int GRANULARITY, int VECTOR>
__device__ __forceinline__ void compute(const Operands& of, const Bundle& bundle, Word column, int lane) {
    const Loads<GRANULARITY, VECTOR> from(of.values, of.deltas, bundle.first_value, bundle.first_delta);
    const int count = bundle.columns / VECTOR;
    float sums[GRANULARITY][TOKENS] = {};
    Load<GRANULARITY, VECTOR> coming = from.get(0, lane);
    for (int at = 0; at < count; ++at) {
        const Load<GRANULARITY, VECTOR> now = coming;
        if (at + 1 < count) coming = from.get(at + 1, lane);
#pragma unroll
        for (int step = 0; step < VECTOR; ++step) {
            const Word place = now.place_of(column, step + 1);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const float feature = to_float(__ldg(of.x[token] + place));
#pragma unroll
                for (int row = 0; row < GRANULARITY; ++row) {
                    sums[row][token] += scalar_of(now.values, step * GRANULARITY + row) * feature;
                }
            }
        }
        column = now.place_of(column, VECTOR);
    }
#pragma unroll
    for (int row = 0; row < GRANULARITY; ++row) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = sums[row][token];
#pragma unroll
            for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
            if (lane == 0) of.partial[(long long)of.slots[bundle.first_slot + row] * TOKENS + token] = sum;
        }
    }
}

template <int GRANULARITY>
__device__ __forceinline__ void compute_vectors(const Operands& of, const Bundle& bundle, Word column, int lane) {
    if (bundle.vector == 4) return compute<GRANULARITY, 4>(of, bundle, column, lane);
    compute<GRANULARITY, 1>(of, bundle, column, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarp) semisparse_ec_csr_paper(
    const SCALAR* __restrict__ x,             // [m, k]
    const SCALAR* __restrict__ values,        // [values]
    const unsigned char* __restrict__ deltas,  // [deltas * DELTA_BITS / 8]
    const INDEX* __restrict__ bases,          // [bundles, 32]
    const Bundle* __restrict__ bundles,       // [bundles]
    const int* __restrict__ slots,            // [slots]
    float* __restrict__ partial,              // [token groups, slots, TOKENS]
    int count, int m, int k, int slot_count   // count: of bundles
) {
    const int number = blockIdx.x * WARPS + threadIdx.x / kWarp;
    if (number >= count) return;
    const int lane = threadIdx.x % kWarp;
    Operands of{{}, values, deltas, slots, partial + (long long)blockIdx.y * slot_count * TOKENS};
    // Tokens past m repeat the last one and are not stored.
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) of.x[token] = x + (long long)min((int)blockIdx.y * TOKENS + token, m - 1) * k;
    const Bundle bundle = bundles[number];
    const Word column = bases[number * kWarp + lane];
#if COARSEST >= 8
    if (bundle.granularity == 8) return compute_vectors<8>(of, bundle, column, lane);
#endif
#if COARSEST >= 4
    if (bundle.granularity == 4) return compute_vectors<4>(of, bundle, column, lane);
#endif
#if COARSEST >= 2
    if (bundle.granularity == 2) return compute_vectors<2>(of, bundle, column, lane);
#endif
    compute_vectors<1>(of, bundle, column, lane);
}

extern "C" __global__ void semisparse_ec_csr_add(
    const float* __restrict__ partial,   // [token groups, slots, TOKENS]
    const int* __restrict__ row_slots,   // [n + 1]
    const SCALAR* __restrict__ bias,     // [n] or null
    SCALAR* __restrict__ y,              // [m, n]
    int m, int n, int slot_count
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int token = blockIdx.y;
    if (row >= n) return;
    const float* sums = partial + (long long)(token / TOKENS) * slot_count * TOKENS + token % TOKENS;
    float sum = 0.0f;
    for (int slot = row_slots[row]; slot < row_slots[row + 1]; ++slot) sum += sums[(long long)slot * TOKENS];
    store(y + (long long)token * n + row, sum + (bias ? to_float(bias[row]) : 0.0f));
}
