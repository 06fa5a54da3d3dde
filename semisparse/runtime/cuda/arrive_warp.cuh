// Warps that hand the stages of a pipeline on and back, and how racecheck's builds do it.

#pragma once

#include "ptx/bar.cuh"
#include "ptx/mbarrier.cuh"

// How often a warp arrives when it hands a stage back: once, by one lane. A build with EVERY_LANE_ARRIVES is for racecheck,
// which takes an arrival to order the accesses of the arriving lane alone (docs/experiments/sanitizers.md).
#ifdef EVERY_LANE_ARRIVES
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

// The warp arrives, with all its lanes: the mbarrier counts kArrivalsPerWarp for it.
__device__ __forceinline__ void mbarrier_arrive_warp(Word mbarrier, int lane) {
    if (lane < kArrivalsPerWarp) mbarrier_arrive(mbarrier);
}

// The warp arrives on the mbarrier at the same address of each of the cluster's CTAs.
template <int CTAS>
__device__ __forceinline__ void mbarrier_arrive_warp_cluster(Word mbarrier, int lane) {
    if constexpr (kArrivalsPerWarp == 1) {
        if (lane < CTAS) mbarrier_arrive_cluster(mbarrier, lane);
    } else {
        for (int rank = 0; rank < CTAS; ++rank) mbarrier_arrive_cluster(mbarrier, rank);
    }
}

// __syncwarp between copies by cp.async and the warp's reads of them. racecheck does not take it to order copies that were asked
// for before a __syncthreads; its builds have a named barrier, which a warp that comes alone completes.
__device__ __forceinline__ void sync_warp_copied() {
    if constexpr (kArrivalsPerWarp == 1) __syncwarp();
    else bar_sync<32>(1 + threadIdx.x / 32 % 15);
}
