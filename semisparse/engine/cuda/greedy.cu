// Chooses the most probable next token of each sequence s and advances the decoding state: stores the token to tokens[s] and to
// output[steps[0], s], and increments positions[s]. The last CTA increments steps[0]. Of equal logits the first is chosen; a
// NaN counts as the largest, as in torch.argmax.
//
// Grid: a CTA per sequence. CTA: 1,024 threads.
//
// Compiled with SCALAR and VECTOR (values per load; the vocabulary is a multiple of it, and logits are aligned to it).

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

struct Candidate {
    float value;
    int token;
};

// Whether `value` is chosen before `than`, which has a smaller index: it is larger, or the first NaN.
__device__ __forceinline__ bool exceeds(float value, float than) { return !(value <= than) && !isnan(than); }

__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
    const Candidate first = a.token < b.token ? a : b, second = a.token < b.token ? b : a;
    return exceeds(second.value, first.value) ? second : first;
}

__device__ __forceinline__ Candidate best_of_warp(Candidate best) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        best = better(best, {__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.token, step)});
    return best;
}

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_greedy(
    const SCALAR* logits,  // [sequences, vocabulary]
    long long* tokens,     // [sequences]
    int* positions,        // [sequences]
    long long* output,     // [capacity, sequences]
    int* steps,            // [2]: next row of output; count of finished CTAs, 0 between launches
    int vocabulary, int capacity
) {
    __shared__ Candidate warp_best[32];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int step = steps[0], position = positions[blockIdx.x];  // loaded with the logits, not after them
    const SCALAR* row = logits + static_cast<long long>(blockIdx.x) * vocabulary;
    Candidate best{to_float(row[0]), 0};
#pragma unroll 4
    for (int i = threadIdx.x; i < vocabulary / VECTOR; i += blockDim.x) {
        const Unit unit = load_unit(row, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
            if (exceeds(unit.at(j), best.value)) best = {unit.at(j), i * VECTOR + j};
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = best_of_warp(warp_best[threadIdx.x]);
    if (threadIdx.x) return;
    tokens[blockIdx.x] = best.token;
    positions[blockIdx.x] = position + 1;
    if (step < capacity) output[static_cast<long long>(step) * gridDim.x + blockIdx.x] = best.token;
    if (gridDim.x == 1) {
        steps[0] = step + 1;
    } else if (atom_acq_rel_gpu_increment(steps + 1) == gridDim.x - 1) {
        steps[0] = step + 1, steps[1] = 0;
    }
}
