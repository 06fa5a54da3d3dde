// Thread block clusters (Hopper and later).

#pragma once

#include "word.cuh"

__device__ __forceinline__ Word cluster_ctarank() {
    Word rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void barrier_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
