// Stands in for ptx/cp_async.cuh. With `adverse`, copies arrive when they are waited for.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

inline void start_copy(Word to, const void* from, Word bytes, Word size) {
    shared_at(to, size, size);
    check_aligned(from, size);
    if (failure) return;
    if (adverse) self().open.push_back({to, from, bytes, size});
    else do_copy({to, from, bytes, size});
}

inline void cp_async_16(Word to, const void* from, int source_bytes = 16) { start_copy(to, from, source_bytes, 16); }
template <int offset> void cp_async_16_at(Word to, const void* from) {
    start_copy(to + offset, static_cast<const char*>(from) + offset, 16, 16);
}
inline void cp_async_16_prefetch_128(Word to, const void* from) {
    cp_async_16(to, from);
}

template <int bytes> void cp_async(Word to, const void* from) { start_copy(to, from, bytes, bytes); }

inline void cp_async_commit_group() {
    self().committed.push_back(std::move(self().open));
    self().open.clear();
}

template <int pending> void cp_async_wait_group() {
    auto& groups = self().committed;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) do_copy(copy);
        groups.erase(groups.begin());
    }
}

inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group<0>();
}

inline void cp_async_mbarrier_arrive_noinc(Word mbarrier) {
    cp_async_wait_all();
    mbarrier_arrive(mbarrier);
}

inline void fence_proxy_async() {}
