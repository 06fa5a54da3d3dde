// Stands in for ptx/mbarrier.cuh: a phase ends once all have arrived and the bytes that were expected have come.

#pragma once

#include "../machine.cuh"

inline void mbarrier_check(Mbarrier& mbarrier) {
    if (mbarrier.pending || mbarrier.bytes) return;
    mbarrier.pending = mbarrier.count;
    ++mbarrier.phase;
    ++progress;
}

inline Mbarrier& mbarrier_at(Word address, Cta* cta = here) {
    const auto found = cta->mbarriers.find(address);
    if (found != cta->mbarriers.end()) return found->second;
    fail("an mbarrier that was not initialised");
    return cta->mbarriers[address];
}

inline void mbarrier_init(Word mbarrier, int count) {
    shared_at(mbarrier, 8, 8);
    here->mbarriers[mbarrier] = {count, count, 0, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_at(Word mbarrier, Cta* cta) {
    Mbarrier& found = mbarrier_at(mbarrier, cta);
    if (found.pending == 0) fail("more arrivals than an mbarrier expects");
    --found.pending;
    mbarrier_check(found);
}

inline void mbarrier_arrive(Word mbarrier) { mbarrier_arrive_at(mbarrier, here); }

inline void mbarrier_arrive_expect_tx(Word mbarrier, int bytes) {
    mbarrier_at(mbarrier).bytes += bytes;
    mbarrier_arrive(mbarrier);
}

inline void mbarrier_arrive_cluster(Word mbarrier, Word rank) {
    if (rank >= cluster_size) return fail("a CTA that the cluster does not have");
    mbarrier_arrive_at(mbarrier, here->cluster->ctas[rank].get());
}

inline void mbarrier_complete_tx(Word mbarrier, Word bytes, Cta* cta) {
    Mbarrier& found = mbarrier_at(mbarrier, cta);
    found.bytes -= bytes;
    mbarrier_check(found);
}

// With `adverse`, bulk copies arrive when a thread waits for them.
inline void mbarrier_wait_parity(Word mbarrier, int parity) {
    while (!failure && (mbarrier_at(mbarrier).phase & 1) == parity) {
        const auto waiting = here->bulk_copies.find(mbarrier);
        if (waiting == here->bulk_copies.end()) {
            pause_fiber();
            continue;
        }
        const auto copy = std::move(waiting->second);
        here->bulk_copies.erase(waiting);
        copy();
    }
}
