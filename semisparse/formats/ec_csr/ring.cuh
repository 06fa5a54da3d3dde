// A thread's loads on their way to places in shared memory that only it reads: more of them than registers would hold, and as
// many blocks on a processor as few registers allow.
//
// Compiled for AHEAD (loads on their way while one is used) and what lists.cuh is compiled for.

#pragma once

#include "lists.cuh"

template <int threads>
struct Ring {
    static constexpr int kSlot = kDeltaBytes < 4 ? 4 : kDeltaBytes;  // bytes of deltas; of 2, two lanes copy four
    static constexpr int kBytes = AHEAD * threads * (16 + kSlot);

    const char* values;
    const char* deltas;

    __device__ __forceinline__ explicit Ring(const char* begin)
        : values(begin + threadIdx.x * 16), deltas(begin + AHEAD * threads * 16 + threadIdx.x * kSlot) {}

    // Asks for the load `index` of a list, to come to a slot.
    __device__ __forceinline__ void ask(const List& list, int index, int slot) const {
        cp_async_16(smem_address(values) + slot * (threads * 16), list.values + index * kWarp);
        const char* from = list.deltas + index * (kWarp * kDeltaBytes) - odd_bytes();
        cp_async<kSlot>(smem_address(deltas) + slot * (threads * kSlot), from);
    }

    // Waits for the load that was asked for AHEAD groups of copies ago.
    __device__ __forceinline__ Load take(int slot) const {
        cp_async_wait_group<AHEAD - 1>();
        Load load = {*reinterpret_cast<const uint4*>(values + slot * (threads * 16)),
                     *reinterpret_cast<const Deltas*>(deltas + slot * (threads * kSlot))};
        if constexpr (kDeltaBytes < kSlot) load.deltas.words[0] = load.deltas.words[0] >> 8 * odd_bytes() & 0xffffu;
        return load;
    }

    static __device__ __forceinline__ int odd_bytes() { return kDeltaBytes < kSlot ? threadIdx.x % 2 * kDeltaBytes : 0; }
};

// The same in registers, for kernels that need shared memory for more tokens.
struct Held {
    Load loads[AHEAD];

    __device__ __forceinline__ void ask(const List& list, int index, int slot) { loads[slot] = list.get(index); }
    __device__ __forceinline__ Load take(int slot) const { return loads[slot]; }
};
