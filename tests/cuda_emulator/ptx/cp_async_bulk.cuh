// Stands in for ptx/cp_async_bulk.cuh.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

inline void start_bulk_copy(Word to, const void* from, Word bytes, Word mbarrier, Cta* cta) {
    shared_at(to, bytes, 16, cta);
    check_aligned(from, 16);
    if (bytes % 16) fail("a bulk copy's length is no multiple of 16");
    if (failure) return;
    auto copy = [=] {
        std::memcpy(cta->shared + to, from, bytes);
        mbarrier_complete_tx(mbarrier, bytes, cta);
    };
    if (adverse) cta->bulk_copies.emplace(mbarrier, copy);
    else copy();
    ++progress;
}

inline void cp_async_bulk(Word to, const void* from, int bytes, Word mbarrier) {
    start_bulk_copy(to, from, bytes, mbarrier, here);
}

inline void cp_async_bulk_multicast(Word to, const void* from, Word bytes, Word mbarrier, unsigned short cta_mask) {
    if (cta_mask >> cluster_size) return fail("a CTA that the cluster does not have");
    for (unsigned rank = 0; rank < cluster_size; ++rank)
        if (cta_mask >> rank & 1) start_bulk_copy(to, from, bytes, mbarrier, here->cluster->ctas[rank].get());
}

inline void cp_async_bulk_prefetch_L2(const void* from, Word bytes) {
    check_aligned(from, 16);
    if (bytes % 16) fail("a prefetch's length is no multiple of 16");
}
