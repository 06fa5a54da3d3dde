// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for 1 to 16 tokens, w in EC-CSR (layout `paper`): the paper's kernel (section 7).
//
// Layout: README.md, "EC-CSR".
//
// semisparse_ec_csr_paper_decode: Grid: (bundles / WARPS, passes of TOKENS tokens). CTA: WARPS warps, one bundle each; no
// shared memory. A lane walks a contiguous part of the bundle's columns and reads x from global memory; accumulators are
// float32, and added over the lanes by shuffles.
//
// semisparse_ec_csr_paper_reduce: Grid: (n / 256, m); one thread per output. The paper adds to y atomically. Here each row of a
// bundle writes its partial sum to a slot of its own, and this kernel adds those of a row of w in order: every run gives
// the same bits.
//
// One token, 70 %, 8-bit deltas, 4096 x 4096, H200 (results/h200/ec_csr-ablation.csv): 14.8 us, 13.5 with extraction;
// ../cuda/decode.cu takes 6.9. It was not profiled, so what bounds it is not known.
//
// Macros: SCALAR and DELTA_BITS (load.cuh), TOKENS, COARSEST (rows of the coarsest blocks), INDEX (the type of base columns:
// unsigned short or unsigned int), WARPS.

#include "load.cuh"

// Rows of its block, columns per load, columns per lane; indices of its first delta, value and slot.
struct Bundle {
    int granularity, vector, columns, first_delta, first_value, first_slot;
};

struct Operands {
    const SCALAR* x[TOKENS];  // the rows of the pass's tokens
    const SCALAR* values;
    const unsigned char* deltas;
    const int* slots;
    float* partial;
};

template <int GRANULARITY, int VECTOR>
__device__ __forceinline__ void compute(const Operands& of, const Bundle& bundle, Word column, int lane) {
    const BundleLoads<GRANULARITY, VECTOR> from(of.values, of.deltas, bundle.first_value, bundle.first_delta);
    const int count = bundle.columns / VECTOR;
    float sums[GRANULARITY][TOKENS] = {};
    LaneLoad<GRANULARITY, VECTOR> next = from.get(0, lane);
    for (int at = 0; at < count; ++at) {
        const LaneLoad<GRANULARITY, VECTOR> now = next;
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
    const int* __restrict__ slots,             // [slots]: where each row of a bundle writes its partial sum
    float* __restrict__ partial,               // [passes, slots, TOKENS]
    int bundle_count, int m, int k, int slot_count
) {
    const int bundle_index = blockIdx.x * WARPS + threadIdx.x / kWarp;
    if (bundle_index >= bundle_count) return;
    const int lane = threadIdx.x % kWarp;
    Operands of{{}, values, deltas, slots, partial + (long long)blockIdx.y * slot_count * TOKENS};
    // In place of tokens past m it reads token m - 1 again; no output depends on their sums.
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) of.x[token] = x + (long long)min((int)blockIdx.y * TOKENS + token, m - 1) * k;
    const Bundle bundle = bundles[bundle_index];
    const Word column = bases[bundle_index * kWarp + lane];
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
    const int* __restrict__ row_slots,  // [n + 1]: row r is the sum of partial sums row_slots[r] to row_slots[r + 1] - 1
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
