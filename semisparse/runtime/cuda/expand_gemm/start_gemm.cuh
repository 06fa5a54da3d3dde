// When a kernel that writes x for gemm.cuh lets the GEMM start.

#pragma once

#include "ptx/griddepcontrol.cuh"

// Waits for the kernel before, and lets the GEMM start. With `early` it may start, and read weights, before the kernel before has
// ended: no kernel on the stream may write them then. It waits for x, and so for the kernels before, in any case.
__device__ __forceinline__ void wait_and_start_gemm(bool early) {
    if (early) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (!early) griddepcontrol_launch_dependents();
}
