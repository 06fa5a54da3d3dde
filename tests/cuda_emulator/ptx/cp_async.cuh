// Stands in for ptx/cp_async.cuh. With `adverse`, copies arrive when they are waited for.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

// Copies `bytes` bytes and fills with zeros up to `size`.
void start_copy(Word to, const void* from, Word bytes, Word size);
void cp_async_commit_group();
void wait_for_copies(size_t pending);

inline void cp_async_16(Word to, const void* from, int source_bytes = 16) { start_copy(to, from, source_bytes, 16); }
template <int offset> void cp_async_16_at(Word to, const void* from) {
    start_copy(to + offset, static_cast<const char*>(from) + offset, 16, 16);
}
inline void cp_async_16_prefetch_128(Word to, const void* from) {
    cp_async_16(to, from);
}

template <int bytes> void cp_async(Word to, const void* from) { start_copy(to, from, bytes, bytes); }

template <int pending> void cp_async_wait_group() { wait_for_copies(pending); }

inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group<0>();
}

inline void cp_async_mbarrier_arrive_noinc(Word mbarrier) {
    cp_async_wait_all();
    mbarrier_arrive(mbarrier);
}

inline void fence_proxy_async() {}
