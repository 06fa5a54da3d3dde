// Stands in for the shared clusters.cuh, for kernels compiled with SPLIT blocks a cluster that hand numbers to the last of them.
// Blocks run one after another, so what the first ones store is kept until the last one comes to the same meeting.

#pragma once

#include <map>

#include "machine.cuh"
#include "word.cuh"

struct Stored { Word place; float value; };

std::map<int, std::vector<Stored>> stored_for_last;  // by the number of the meeting

// How often this thread has met the cluster's others.
inline int& meetings() {
    static unsigned block = ~0u;
    static std::vector<int> counts;
    if (block != blockIdx.x) counts.assign(blockDim.x, 0);
    block = blockIdx.x;
    return counts[threadIdx.x];
}

inline void store_at(Word place, Word block, float value) {
    if (place % 4 || place + 4 > shared_bytes) fail("outside shared memory, or not aligned");
    if (block != SPLIT - 1) fail("only a cluster's last block is emulated as one that others store in");
    stored_for_last[meetings()].push_back({place, value});
}

inline void sync_cluster() {
    __syncthreads();
    if (blockIdx.x % SPLIT == SPLIT - 1) {
        for (const Stored& stored : stored_for_last[meetings()]) std::memcpy(machine_shared + stored.place, &stored.value, 4);
        stored_for_last.erase(meetings());
    }
    ++meetings();
    __syncthreads();
}
