// Arrivals of whole warps on mbarriers, as consumers hand the stage of a pipeline back.

#pragma once

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
