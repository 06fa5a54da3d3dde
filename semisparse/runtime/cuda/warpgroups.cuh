// Hopper's asynchronous units: barriers that count bytes, bulk copies, products of a warpgroup, and its share of the registers.

#pragma once

#include "word.cuh"

// How a thread waits for a barrier is left to the formats: a loop in the assembler's text and one around it compile to different
// code.
namespace barrier {

__device__ __forceinline__ void init(Word at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(at), "r"(arrivals) : "memory");
}

// Lets the cluster's other threads and the copy engine see what was initialised.
__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

__device__ __forceinline__ void arrive(Word at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(at) : "memory");
}

// Arrives, and has the phase last until so many bytes have been copied.
__device__ __forceinline__ void expect(Word at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(at), "r"(bytes) : "memory");
}

}  // namespace barrier

// One thread's request; the barrier is told of the bytes.
__device__ __forceinline__ void copy_bulk(Word to, const void* from, int bytes, Word told) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        : : "r"(to), "l"(from), "r"(bytes), "r"(told) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits for all but the `open` groups of products that were committed last.
template <int open>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(open) : "memory");
}

// A warpgroup's registers a thread; together they have what the block began with.
template <int count>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(count)); }
template <int count>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(count)); }
