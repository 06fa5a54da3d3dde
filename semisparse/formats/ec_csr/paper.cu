// y[m, n] = sum_k x[m, k] * w[n, k] for an ec_csr weight in the layout `paper`, TOKENS tokens at a time (section 7).
//
// A warp computes a block; its lanes walk a contiguous part each, read x where it lies, and add their sums by shuffles.
// Where the paper adds to y atomically, each block's sums go to slots of their own, and a second kernel adds those of each
// row in order: every run gives the same bits.
//
// Compiled for SCALAR, TOKENS, DELTA_BITS, AHEAD (walk.cuh), COARSEST (the most rows of a block), INDEX (unsigned short or
// unsigned int, of base columns) and WARPS.

#include "walk.cuh"

struct GlobalX {
    static constexpr int kUnit = 1;
    const SCALAR* x[TOKENS];

    __device__ __forceinline__ void get(Word column, float (&out)[TOKENS]) const {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) out[token] = to_float(__ldg(x[token] + column));
    }
};

struct Block {
    Bundle bundle;
    const SCALAR* values;
    const unsigned char* deltas;
    const int* slots;
    Word base;
    int lane;
};

template <int GRANULARITY, int VECTOR>
__device__ __forceinline__ void compute(const Block& block, const GlobalX& x, float* partial) {
    float sums[GRANULARITY][TOKENS] = {};
    Walk<GRANULARITY, VECTOR, GlobalX>(block.bundle, block.values, block.deltas, block.lane).run(block.base, x, sums);
#pragma unroll
    for (int row = 0; row < GRANULARITY; ++row) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = sums[row][token];
#pragma unroll
            for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
            if (block.lane == 0) partial[(long long)block.slots[row] * TOKENS + token] = sum;
        }
    }
}

template <int GRANULARITY>
__device__ __forceinline__ void compute_vectors(const Block& block, const GlobalX& x, float* partial) {
    if (block.bundle.vector == 4) return compute<GRANULARITY, 4>(block, x, partial);
    compute<GRANULARITY, 1>(block, x, partial);
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
    GlobalX rows;
    // Tokens past m repeat the last one and are not stored.
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) rows.x[token] = x + (long long)min((int)blockIdx.y * TOKENS + token, m - 1) * k;
    const Bundle bundle = bundles[number];
    const Block block{bundle, values, deltas, slots + bundle.first_slot, bases[number * kWarp + lane], lane};
    float* sums = partial + (long long)blockIdx.y * slot_count * TOKENS;
#if COARSEST >= 8
    if (bundle.granularity == 8) return compute_vectors<8>(block, rows, sums);
#endif
#if COARSEST >= 4
    if (bundle.granularity == 4) return compute_vectors<4>(block, rows, sums);
#endif
#if COARSEST >= 2
    if (bundle.granularity == 2) return compute_vectors<2>(block, rows, sums);
#endif
    compute_vectors<1>(block, rows, sums);
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
