// Stands in for the shared copies.cuh. Places in shared memory are checked; late copies arrive when they are waited for.

#pragma once

#include <cstddef>

#include "machine.cuh"
#include "word.cuh"

inline Word shared_address(const void* place) {
    const ptrdiff_t at = static_cast<const char*>(place) - machine_shared;
    if (at < 0 || at > static_cast<ptrdiff_t>(shared_bytes)) fail("outside shared memory");
    return static_cast<Word>(at);
}

inline uint4 read_once(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) fail("a load is not aligned");
    return *static_cast<const uint4*>(from);
}

// Starts a copy to `size` bytes, of which `bytes` are read.
inline void start_copy(Word to, const void* from, int bytes, Word size) {
    if (to + size > shared_bytes) fail("outside shared memory");
    if (to % size) fail("a place in shared memory is not aligned");
    if (reinterpret_cast<uintptr_t>(from) % size) fail("a copy's source is not aligned");
    if (failure) return;
    if (adverse) self().open.push_back({to, from, bytes, size});
    else do_copy({to, from, bytes, size});
}

inline void copy_async(Word to, const void* from, int bytes = 16) { start_copy(to, from, bytes, 16); }

template <int bytes> void copy_few_async(Word to, const void* from) { start_copy(to, from, bytes, bytes); }

inline void commit_copies() {
    self().committed.push_back(std::move(self().open));
    self().open.clear();
}

template <int open>
void wait_for_copies() {
    auto& groups = self().committed;
    while (groups.size() > open) {
        for (const Copy& copy : groups.front()) do_copy(copy);
        groups.erase(groups.begin());
    }
}
