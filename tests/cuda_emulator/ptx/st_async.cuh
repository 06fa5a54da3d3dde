// Stands in for ptx/st_async.cuh. With `adverse`, stores arrive when a thread waits for them.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

inline void st_async_v4(Word to, const Word (&words)[4], Word mbarrier, Word rank) {
    if (rank >= cluster_size) return fail("a CTA that the cluster does not have");
    Cta* cta = here->cluster->ctas[rank].get();
    shared_at(to, 16, 16, cta);
    if (failure) return;
    const uint4 stored{words[0], words[1], words[2], words[3]};
    auto store = [=] {
        std::memcpy(cta->shared + to, &stored, 16);
        mbarrier_complete_tx(mbarrier, 16, cta);
    };
    if (adverse) cta->bulk_copies.emplace(mbarrier, store);
    else store();
    ++progress;
}
