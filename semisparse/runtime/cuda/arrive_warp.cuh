// How a warp arrives on mbarriers and synchronises after cp.async; both differ in kernels compiled for racecheck, which sees less
// than the hardware orders (docs/experiments/sanitizers.md).

#pragma once

#include "ptx/bar.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

#ifdef EVERY_LANE_ARRIVES
constexpr bool kForRacecheck = true;
#else
constexpr bool kForRacecheck = false;
#endif

// Arrivals of a warp that releases a stage: one, by one lane. racecheck takes it to order only the arriving lane's accesses.
constexpr int kArrivalsPerWarp = kForRacecheck ? 32 : 1;

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
// before a __syncthreads; for racecheck it is a named barrier of 32 threads. All warps must call it equally often, or racecheck
// misses the next __syncthreads.
__device__ __forceinline__ void sync_warp_copied() {
    if constexpr (kForRacecheck) bar_sync<32>(1 + threadIdx.x / 32 % 15);
    else __syncwarp();
}

// Before a __syncthreads that cp.async copies may outlast: for racecheck they end here. It does not take the __syncwarp after them
// to order copies that were issued before the barrier.
__device__ __forceinline__ void end_copies_for_racecheck() {
    if constexpr (kForRacecheck) cp_async_wait_group<0>();
}
