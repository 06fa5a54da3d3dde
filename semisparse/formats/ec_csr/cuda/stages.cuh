// The loads of a lane that are in flight while it uses an earlier one. No other thread reads its stages, so no barrier is
// needed.
//
// Compiled for STAGES and what lists.cuh is compiled for.

#pragma once

#include "lists.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

// In shared memory, by cp.async: this allows more stages than registers do, and leaves registers for more CTAs per SM.
template <int threads>
struct SharedStages {
    // Bytes of deltas per lane and stage. cp.async copies 4 at least, so where a lane has 2, it copies its neighbour's as well.
    static constexpr int kStageBytes = kDeltaBytes < 4 ? 4 : kDeltaBytes;

    const char* values;
    const char* deltas;

    __device__ __forceinline__ explicit SharedStages(const char* begin)
        : values(begin + threadIdx.x * 16), deltas(begin + STAGES * threads * 16 + threadIdx.x * kStageBytes) {}

    // Starts copying load `index` of a list to a stage.
    __device__ __forceinline__ void start(const List& list, int index, int stage) const {
        cp_async_16(smem_address(values) + stage * (threads * 16), list.values + index * kWarp);
        const char* from = list.deltas + index * (kWarp * kDeltaBytes) - neighbour_bytes();
        cp_async<kStageBytes>(smem_address(deltas) + stage * (threads * kStageBytes), from);
    }

    // Waits for the load that was started STAGES cp.async groups ago.
    __device__ __forceinline__ Load take(int stage) const {
        cp_async_wait_group<STAGES - 1>();
        Load load = {*reinterpret_cast<const uint4*>(values + stage * (threads * 16)),
                     *reinterpret_cast<const Deltas*>(deltas + stage * (threads * kStageBytes))};
        if constexpr (kDeltaBytes < kStageBytes) load.deltas.words[0] = load.deltas.words[0] >> 8 * neighbour_bytes() & 0xffffu;
        return load;
    }

    // Bytes of the even neighbour's deltas that precede an odd lane's in the 4 bytes that both copy.
    static __device__ __forceinline__ int neighbour_bytes() {
        return kDeltaBytes < kStageBytes ? threadIdx.x % 2 * kDeltaBytes : 0;
    }
};

// In registers, for kernels that need shared memory for more tokens.
struct RegisterStages {
    Load loads[STAGES];

    __device__ __forceinline__ void start(const List& list, int index, int stage) { loads[stage] = list.get(index); }
    __device__ __forceinline__ Load take(int stage) const { return loads[stage]; }
};
