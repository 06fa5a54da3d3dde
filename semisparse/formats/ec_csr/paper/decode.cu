// y[m, n] = x[m, k] * w[n, k]^T, w in EC-CSR, for 1 to 16 tokens: the paper's kernel (section 7).
//
// Layout: `EC-CSR` in README.md.
//
// semisparse_ec_csr_paper_decode: Grid: (bundles / WARPS, passes of TOKENS tokens). CTA: WARPS warps, a bundle each; no
// shared memory. Each lane walks a contiguous part of the block's columns, reads x from global memory, and adds its sums to
// the other lanes' by shuffles.
//
// semisparse_ec_csr_paper_reduce: Grid: (n / 256, m); one thread per output. The paper adds to y atomically; here each row of
// a bundle writes a partial sum of its own, and this kernel adds those of a row of w in order: every run returns the same
// bits.
//
// One token, 70 %, 8-bit deltas, H200 (results/h200/ec_csr-ablation.csv): 14.8 us at 4096 x 4096, 13.5 with extraction, for 6.9
// of ../cuda/decode.cu. It was not profiled.
//
// Compiled for SCALAR, TOKENS, DELTA_BITS (load.cuh), COARSEST (the most rows of a block), INDEX (unsigned short or unsigned
// int, of base columns) and WARPS.

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
    Load<GRANULARITY, VECTOR> next = from.get(0, lane);
    for (int at = 0; at < count; ++at) {
        const Load<GRANULARITY, VECTOR> now = next;
        if (at + 1 < count) next = from.get(at + 1, lane);
#pragma unroll
        for (int entry = 0; entry < VECTOR; ++entry) {
            const Word own = now.column_after(column, entry + 1);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const float feature = to_float(__ldg(of.x[token] + own));
#pragma unroll
                for (int row = 0; row < GRANULARITY; ++row) {
                    sums[row][token] += scalar_at(now.values, entry * GRANULARITY + row) * feature;
                }
            }
        }
        column = now.column_after(column, VECTOR);
    }
#pragma unroll
    for (int row = 0; row < GRANULARITY; ++row) {
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const float sum = warp_sum(sums[row][token]);
            if (lane == 0) of.partial[(long long)of.slots[bundle.first_slot + row] * TOKENS + token] = sum;
        }
    }
}

template <int GRANULARITY>
__device__ __forceinline__ void compute_vectors(const Operands& of, const Bundle& bundle, Word column, int lane) {
    if (bundle.vector == 4) return compute<GRANULARITY, 4>(of, bundle, column, lane);
    compute<GRANULARITY, 1>(of, bundle, column, lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarp) semisparse_ec_csr_paper_decode(
    const SCALAR* __restrict__ x,              // [m, k]
    const SCALAR* __restrict__ values,         // [values]
    const unsigned char* __restrict__ deltas,  // [deltas * DELTA_BITS / 8]
    const INDEX* __restrict__ bases,           // [bundles, 32]
    const Bundle* __restrict__ bundles,        // [bundles]
    const int* __restrict__ slots,             // [slots]
    float* __restrict__ partial,               // [passes, slots, TOKENS]
    int count, int m, int k, int slot_count    // count: of bundles
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

extern "C" __global__ void semisparse_ec_csr_paper_reduce(
    const float* __restrict__ partial,  // [passes, slots, TOKENS]
    const int* __restrict__ row_slots,  // [n + 1]
    const SCALAR* __restrict__ bias,    // [n] or null
    SCALAR* __restrict__ y,             // [m, n]
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
