// What the warps of this format's kernels do beside the shared primitives.

#pragma once

#include "ptx/griddepcontrol.cuh"
#include "ptx/integer.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "types.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global.cuh"

constexpr Word kAll = 0xffffffff;  // lanes

__device__ constexpr bool is_half(const __half*) { return true; }
__device__ constexpr bool is_half(const __nv_bfloat16*) { return false; }

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }

// The low half of a word.
__device__ __forceinline__ __half scalar_of(Word bits, const __half*) { return __ushort_as_half(static_cast<unsigned short>(bits)); }
__device__ __forceinline__ __nv_bfloat16 scalar_of(Word bits, const __nv_bfloat16*) {
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

// The same number, which the assembler keeps in a register: others it makes anew at each use. For whole warps.
__device__ __forceinline__ Word pinned(Word value) { return __shfl_sync(kAll, value, threadIdx.x % 32); }

template <typename T> __device__ __forceinline__ const T* pinned(const T* place) {
    return reinterpret_cast<const T*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(place), threadIdx.x % 32));
}

// `count` words from a place that is aligned to them, or to 16 bytes.
template <int count> __device__ __forceinline__ void read_words(Word* words, const void* place) {
    if constexpr (count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            const uint4 part = static_cast<const uint4*>(place)[i];
            words[4 * i] = part.x;
            words[4 * i + 1] = part.y;
            words[4 * i + 2] = part.z;
            words[4 * i + 3] = part.w;
        }
    } else {
        static_assert(count == 2, "two words or fours");
        const uint2 part = *static_cast<const uint2*>(place);
        words[0] = part.x;
        words[1] = part.y;
    }
}

// The number of this warp in its block; the compiler knows that all lanes have it.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(kAll, static_cast<int>(threadIdx.x / 32), 0); }

// The same in all lanes, as the compiler knows.
__device__ __forceinline__ bool any_of_warp(bool value) { return __any_sync(kAll, value); }
__device__ __forceinline__ Word max_of_warp(Word value) { return __reduce_max_sync(kAll, value); }

// A constant for a loop, by way of a number above 0 that the compiler does not know: it would make others anew at each use.
__device__ __forceinline__ Word kept_constant(Word value, int positive) { return pinned(value + (positive >> 31)); }
