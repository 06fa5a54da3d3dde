// cp.async.bulk: copies of contiguous bytes, issued by one thread and completed on an mbarrier (Hopper and later).

#pragma once

#include "word.cuh"

// `bytes` and both addresses are multiples of 16; the mbarrier must expect the bytes.
__device__ __forceinline__ void cp_async_bulk(Word to, const void* from, int bytes, Word mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        : : "r"(to), "l"(from), "r"(bytes), "r"(mbarrier) : "memory");
}

// Copies to this shared-memory address in each CTA of the cluster whose bit is set, and signals that CTA's mbarrier.
__device__ __forceinline__ void cp_async_bulk_multicast(Word to, const void* from, Word bytes, Word mbarrier,
                                                        unsigned short cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(mbarrier), "h"(cta_mask)
        : "memory");
}

// Prefetches to L2. `bytes` and the address are multiples of 16. A no-op before Hopper.
__device__ __forceinline__ void cp_async_bulk_prefetch_L2(const void* from, Word bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes));
#endif
}
