// mbarrier: barriers in shared memory that count arrivals and bytes (Hopper and later).

#pragma once

#include "word.cuh"

__device__ __forceinline__ void mbarrier_init(Word mbarrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(mbarrier), "r"(count) : "memory");
}

// Makes initialised mbarriers visible to the cluster and to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

__device__ __forceinline__ void mbarrier_arrive(Word mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(mbarrier) : "memory");
}

// Arrives, and adds `bytes` to those that bulk copies must complete before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Word mbarrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(mbarrier), "r"(bytes) : "memory");
}

// Arrives on the mbarrier at this address in CTA `rank` of the cluster. Without `.release.cluster`, whose GPU-wide fence costs
// some 1,200 cycles: the data before it were only read, so no writes need ordering.
__device__ __forceinline__ void mbarrier_arrive_cluster(Word mbarrier, Word rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(mbarrier),
        "r"(rank)
        : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait_parity(Word mbarrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        : : "r"(mbarrier), "r"(parity) : "memory");
}
