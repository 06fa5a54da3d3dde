// y[token, :] = sum over a token's pairs of weight[pair] * outputs[pair, :], in float32 and in the order of the pairs, so that every
// run returns the same bits. A pair is a token and one of the experts that its router chose; pairs of an expert that does not exist
// are left out.
//
// Grid: (tokens, columns / (256 * VECTOR) rounded up). CTA: 256 threads with VECTOR columns each. Bound: memory for many tokens.
//
// Compiled with SCALAR and VECTOR (vector.cuh), and WEIGHT, the type of the router's weights.

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(256) semisparse_combine(
    const SCALAR* outputs,    // [tokens * top_k, columns]
    const long long* chosen,  // [tokens, top_k], the expert of each pair
    const WEIGHT* weights,    // [tokens, top_k]
    SCALAR* y,                // [tokens, columns]
    int columns, int top_k, int experts
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i * VECTOR >= columns) return;
    const long long token = blockIdx.x;
    float sums[VECTOR] = {};
#pragma unroll 4
    for (int j = 0; j < top_k; ++j) {
        const long long pair = token * top_k + j;
        if (chosen[pair] < 0 || chosen[pair] >= experts) continue;
        const float weight = to_float(weights[pair]);
        const Unit output = load_unit(outputs + pair * columns, i);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sums[v] += weight * output.at(v);
    }
    Unit result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) result.set(v, sums[v]);
    store_unit(y + token * columns, i, result);
}
