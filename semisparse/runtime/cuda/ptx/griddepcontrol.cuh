// griddepcontrol: programmatic dependent launch (PDL), a no-op before Hopper.

#pragma once

// Waits until the preceding kernel on the stream has completed and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets the next kernel on the stream start once every CTA has called this or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}
