// Hopper's clusters of blocks, which reach one another's shared memory.

#pragma once

#include "word.cuh"

// Arrives at the same barrier of another block of the cluster. What is handed back was only read, so no fence is asked for:
// `.release.cluster` costs a fence of the whole GPU, some 1,200 cycles each time.
__device__ __forceinline__ void arrive_at(Word barrier, Word block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Copies to the same place of every block of the cluster whose bit is set, and tells each one's barrier.
__device__ __forceinline__ void copy_to_all(Word to, const void* from, Word bytes, Word barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ Word block_of_cluster() {
    Word rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
