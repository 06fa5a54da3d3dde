// out[m, i] = silu(gate[m, i]) * up[m, i], where gate and up are columns of one matrix: the activation of a gated MLP. Both factors are
// rounded to SCALAR first, as transformers rounds them.
//
// Grid: CTAs along the columns, rows; a thread per element. Bound by memory for many rows.
//
// Compiled for SCALAR.

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256) semisparse_engine_silu_mul(
    const SCALAR* gate_up,  // [m, stride]
    SCALAR* out,            // [m, columns]
    int columns, int stride, int gate_start, int up_start
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const SCALAR* row = gate_up + static_cast<long long>(blockIdx.y) * stride;
    const float gate = to_float(row[gate_start + column]);
    SCALAR activated;
    store(&activated, gate / (1.0f + expf(-gate)));
    store(out + static_cast<long long>(blockIdx.y) * columns + column, to_float(activated) * to_float(row[up_start + column]));
}
