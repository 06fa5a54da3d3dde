// y[token, :] = sum over a token's pairs of weight[pair] * outputs[pair, :], in float32 and in the order of the pairs, so that every
// run returns the same bits. A pair is a token and one of the experts that its router chose; pairs of an expert that does not exist
// are left out.
//
// Grid: (tokens, columns / (threads * VECTOR) rounded up). CTA: up to 256 threads with VECTOR columns each. Bound: memory for many
// tokens, latency for few. So the loads of kAhead outputs are in flight at once, and the experts and their weights are loaded before
// griddepcontrol.wait if they are `complete` (Routing in runtime/experts.py).
//
// Compiled with SCALAR and VECTOR (vector.cuh), and WEIGHT, the type of the router's weights.

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

constexpr int kAhead = 8;  // pairs whose loads are in flight

extern "C" __global__ void __launch_bounds__(256) semisparse_combine(
    const SCALAR* outputs,    // [tokens * top_k, columns]
    const long long* chosen,  // [tokens, top_k], the expert of each pair
    const WEIGHT* weights,    // [tokens, top_k]
    SCALAR* y,                // [tokens, columns]
    int columns, int top_k, int experts,
    int complete              // whether `chosen` and `weights` were complete before this kernel could start
) {
    griddepcontrol_launch_dependents();
    if (!complete) griddepcontrol_wait();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    const long long token = blockIdx.x;
    float sums[VECTOR] = {};
    for (int first = 0; first < top_k; first += kAhead) {
        float weight[kAhead];
        bool counts[kAhead];  // whether there is such a pair, with an expert
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const long long pair = token * top_k + first + j;
            const long long expert = first + j < top_k ? chosen[pair] : -1;
            counts[j] = expert >= 0 && expert < experts && i * VECTOR < columns;
            weight[j] = counts[j] ? to_float(weights[pair]) : 0.0f;
        }
        griddepcontrol_wait();
        Unit output[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
            if (counts[j]) output[j] = load_unit(outputs + (token * top_k + first + j) * columns, i);
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v)
                if (counts[j]) sums[v] += weight[j] * output[j].at(v);
    }
    if (i * VECTOR >= columns) return;
    Unit result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) result.set(v, sums[v]);
    store_unit(y + token * columns, i, result);
}
