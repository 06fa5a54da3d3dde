// What the blocks of a cluster send each other: each one, once, so many sums to the next. They arrive in that one's shared memory
// without a fence, and its barrier knows how many bytes are on their way.
//
// Compiled for CLUSTER (blocks).

#pragma once

#include "clusters.cuh"
#include "copies.cuh"
#include "primitives.cuh"
#include "waiting.cuh"

template <int count> struct Sent {
#if CLUSTER > 1
    Word sums, barrier;  // in shared memory

    // By the whole block, before anything that takes long.
    __device__ __forceinline__ Sent() {
        __shared__ float place[count];
        __shared__ unsigned long long waited;
        sums = shared_address(place);
        barrier = shared_address(&waited);
        if (threadIdx.x == 0) expect_bytes(barrier, count * sizeof(float));
        __syncwarp();
        arrive_at_cluster();
    }

    __device__ __forceinline__ void wait() const { barrier::wait(barrier, 0); }
    __device__ __forceinline__ float get(int index) const { return __uint_as_float(read_shared_word(sums + 4 * index)); }

    // Until it expects something.
    __device__ __forceinline__ void wait_for_next_block() const { wait_for_cluster(); }

    __device__ __forceinline__ void send(int index, float sum) const {
        send_word(sums + 4 * index, __float_as_uint(sum), barrier, block_of_cluster() + 1);
    }
#else
    __device__ __forceinline__ void wait() const {}
    __device__ __forceinline__ float get(int) const { return 0.0f; }
    __device__ __forceinline__ void wait_for_next_block() const {}
    __device__ __forceinline__ void send(int, float) const {}
#endif
};
