// Stands in for ptx/cp_async_bulk.cuh.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

void cp_async_bulk(Word to, const void* from, int bytes, Word mbarrier);
void cp_async_bulk_multicast(Word to, const void* from, Word bytes, Word mbarrier, unsigned short cta_mask);

inline void cp_async_bulk_prefetch_L2(const void* from, Word bytes) {
    check_aligned(from, 16);
    if (bytes % 16) fail("a prefetch's length is no multiple of 16");
}
