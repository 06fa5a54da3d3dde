// setmaxnreg: moves registers between the warpgroups of a CTA (Hopper and later).

#pragma once

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers)); }

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers)); }
