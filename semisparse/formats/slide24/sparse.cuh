// What products with 2:4 weights take of Hopper beside the shared primitives.

#pragma once

#include "ptx/bar.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

__device__ __forceinline__ void sync_group(int group) { bar_sync<128>(group + 1); }

// A warp group lets another begin, and that one waits for it, once.
__device__ __forceinline__ void let_group(int group) { bar_arrive<256>(group + 8); }
__device__ __forceinline__ void wait_for_group(int group) { bar_sync<256>(group + 8); }

#if defined(INT8)
using Element = Int8;
using Sum = int;
#elif defined(FP8)
using Element = Fp8;
using Sum = float;
#elif defined(BF16)
using Element = __nv_bfloat16;
using Sum = float;
#else
using Element = __half;
using Sum = float;
#endif
