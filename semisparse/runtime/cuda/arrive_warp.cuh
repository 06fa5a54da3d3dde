// How a warp arrives on mbarriers and synchronises after cp.async; both differ in kernels compiled for racecheck.

#pragma once

#include "ptx/bar.cuh"
#include "ptx/mbarrier.cuh"

// Arrivals of a warp that releases a stage: one, by one lane. EVERY_LANE_ARRIVES is for racecheck, which takes an arrival to
// order only the arriving lane's accesses (docs/experiments/sanitizers.md).
#ifdef EVERY_LANE_ARRIVES
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

// Arrives kArrivalsPerWarp times. All lanes of the warp call it.
__device__ __forceinline__ void mbarrier_arrive_warp(Word mbarrier, int lane) {
    if (lane < kArrivalsPerWarp) mbarrier_arrive(mbarrier);
}

// The same on the mbarriers at this address in all CTAs of the cluster.
template <int CTAS>
__device__ __forceinline__ void mbarrier_arrive_warp_cluster(Word mbarrier, int lane) {
    if constexpr (kArrivalsPerWarp == 1) {
        if (lane < CTAS) mbarrier_arrive_cluster(mbarrier, lane);
    } else {
        for (int rank = 0; rank < CTAS; ++rank) mbarrier_arrive_cluster(mbarrier, rank);
    }
}

// __syncwarp between cp.async copies and the warp's reads of them. racecheck does not take it to order copies that were issued
// before a __syncthreads; for racecheck it is a named barrier of 32 threads.
__device__ __forceinline__ void sync_warp_copied() {
    if constexpr (kArrivalsPerWarp == 1) __syncwarp();
    else bar_sync<32>(1 + threadIdx.x / 32 % 15);
}
