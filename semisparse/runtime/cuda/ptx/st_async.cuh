// st.async: stores to the shared memory of another CTA of the cluster, completed on its mbarrier (Hopper and later).

#pragma once

#include "word.cuh"

// Stores 16 bytes at this shared-memory address in CTA `rank`, and completes 16 bytes on the mbarrier at that address there.
// Unlike a store and a barrier of the cluster, it needs no fence.
__device__ __forceinline__ void st_async_v4(Word to, const Word (&words)[4], Word mbarrier, Word rank) {
    asm volatile(
        "{\n.reg .b32 remote_to, remote_mbarrier;\nmapa.shared::cluster.u32 remote_to, %0, %6;\n"
        "mapa.shared::cluster.u32 remote_mbarrier, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote_to], {%1, %2, %3, %4}, [remote_mbarrier];\n}"
        : : "r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(mbarrier), "r"(rank) : "memory");
}
