// out[m, i] = silu(gate[m, i]) * up[m, i], where gate and up are columns of one matrix: the activation of a gated MLP. Both
// factors are rounded to SCALAR first, as transformers rounds them.
//
// Grid: (rows, columns / (256 * VECTOR) rounded up). CTA: 256 threads with VECTOR values each. Bound: memory for many rows.
//
// Compiled with SCALAR and VECTOR (values per load; columns, stride and both starts are multiples of it, and gate_up is aligned
// to it).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(256) semisparse_silu_mul(
    const SCALAR* gate_up,  // [m, stride]
    SCALAR* out,            // [m, columns]
    int columns, int stride, int gate_start, int up_start
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i * VECTOR >= columns) return;
    const SCALAR* row = gate_up + static_cast<long long>(blockIdx.x) * stride;
    Unit gate = load_unit(row + gate_start, i);
    const Unit up = load_unit(row + up_start, i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) gate.set(j, gate.at(j) / (1.0f + expf(-gate.at(j))));
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) gate.set(j, gate.at(j) * up.at(j));
    store_unit(out + static_cast<long long>(blockIdx.x) * columns, i, gate);
}
