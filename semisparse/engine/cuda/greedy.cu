// The most probable next token of each sequence, and the state of the decode step moved on: tokens[s] becomes it, positions[s] grows by
// 1, and it is appended to the sequence's output at place steps[0], which the last CTA increments. Of equal logits the first counts; a
// NaN counts as the largest, as in torch.argmax.
//
// Grid: a CTA per sequence.
//
// Compiled for SCALAR and VECTOR (values per load; the vocabulary is a multiple of it, and logits are aligned to it).

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

struct Candidate {
    float value;
    int token;
};

__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
    const bool a_nan = isnan(a.value), b_nan = isnan(b.value);
    if (a_nan != b_nan) return a_nan ? a : b;
    if (!a_nan && a.value != b.value) return a.value > b.value ? a : b;
    return a.token < b.token ? a : b;
}

extern "C" __global__ void __launch_bounds__(1024) semisparse_engine_greedy(
    const SCALAR* logits,  // [sequences, vocabulary]
    long long* tokens,     // [sequences]
    int* positions,        // [sequences]
    long long* output,     // [capacity, sequences]
    int* steps,            // [2]: the place in output; a counter, 0
    int vocabulary, int capacity
) {
    __shared__ Candidate of_warps[32];
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const SCALAR* row = logits + static_cast<long long>(blockIdx.x) * vocabulary;
    Candidate best{to_float(row[0]), 0};
#pragma unroll 4
    for (int i = threadIdx.x; i < vocabulary / VECTOR; i += blockDim.x) {
        const Unit unit = load_unit(row, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) best = better(best, {unit.at(j), i * VECTOR + j});
    }
#pragma unroll
    for (int step = 16; step; step /= 2)
        best = better(best, {__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.token, step)});
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < blockDim.x / 32; ++warp) best = better(best, of_warps[warp]);
    const int step = steps[0];
    tokens[blockIdx.x] = best.token;
    positions[blockIdx.x] += 1;
    if (step < capacity) output[static_cast<long long>(step) * gridDim.x + blockIdx.x] = best.token;
    if (atom_acq_rel_gpu_increment(steps + 1) == gridDim.x - 1) steps[0] = step + 1, steps[1] = 0;
}
