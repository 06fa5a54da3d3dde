// y[m, n] = bias[n] + the sum over `splits` of gemm.cu's partial sums [splits, m, pitch], added in the order of K.
//
// Grid: x is along N, with four rows of w per thread; y is the token, or strides over tokens beyond CUDA's limit. No shared
// memory. Bound by reading the partial sums, which gemm.cu has just left in L2.
//
// Macro: SCALAR (__half or __nv_bfloat16).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

extern "C" __global__ void semisparse_gqs_add_partials(
    const float* partials,   // [splits, m, pitch], pitch a multiple of 16
    const SCALAR* bias,      // [n] or null
    SCALAR* __restrict__ y,  // [m, n]
    int m, int n, int pitch, int splits
) {
    const int row = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (row >= n) return;
    for (int token = blockIdx.y; token < m; token += gridDim.y) {
        float4 sum{};
#pragma unroll 4
        for (int split = 0; split < splits; ++split) {
            const long long at = (static_cast<long long>(split) * m + token) * pitch + row;
            const float4 partial = __ldcg(reinterpret_cast<const float4*>(partials + at));
            sum.x += partial.x, sum.y += partial.y, sum.z += partial.z, sum.w += partial.w;
        }
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (row + i >= n) continue;
            store(y + static_cast<long long>(token) * n + row + i, sums[i] + (bias ? to_float(bias[row + i]) : 0.0f));
        }
    }
}
