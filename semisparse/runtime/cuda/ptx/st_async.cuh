// st.async: stores to the shared memory of another CTA of the cluster, completed on its mbarrier (Hopper and later).

#pragma once

#include "word.cuh"

// Stores 4 bytes at this shared-memory address in CTA `rank`, and completes 4 bytes on the mbarrier at that address there.
// Unlike a store and a barrier of the cluster, it needs no fence.
__device__ __forceinline__ void st_async(Word to, Word word, Word mbarrier, Word rank) {
    asm volatile(
        "{\n.reg .b32 remote_to, remote_mbarrier;\nmapa.shared::cluster.u32 remote_to, %0, %3;\n"
        "mapa.shared::cluster.u32 remote_mbarrier, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote_to], %1, [remote_mbarrier];\n}"
        : : "r"(to), "r"(word), "r"(mbarrier), "r"(rank) : "memory");
}

// The same with 16 bytes.
__device__ __forceinline__ void st_async_v4(Word to, float4 values, Word mbarrier, Word rank) {
    asm volatile(
        "{\n.reg .b32 remote_to, remote_mbarrier;\nmapa.shared::cluster.u32 remote_to, %0, %6;\n"
        "mapa.shared::cluster.u32 remote_mbarrier, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote_to], {%1, %2, %3, %4}, [remote_mbarrier];\n}"
        : : "r"(to), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(mbarrier), "r"(rank) : "memory");
}
