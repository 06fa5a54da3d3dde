// Stages in shared memory that producers fill and consumers release, signalled by mbarriers.

#pragma once

#include "ptx/mbarrier.cuh"

// The current stage of a pipeline, and the parity of the phase that its full mbarrier completes next. For the empty mbarrier,
// producers wait for parity ^ 1, which a new mbarrier counts as completed.
template <int stages>
struct PipelineState {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The mbarriers of a pipeline's stages: `full` when the data has arrived, `empty` when all consumers have read it.
struct Pipeline {
    Word mbarriers;  // shared-memory address of the first one
    __device__ __forceinline__ Word full(int stage) const { return mbarriers + stage * 16; }
    __device__ __forceinline__ Word empty(int stage) const { return mbarriers + stage * 16 + 8; }
};
