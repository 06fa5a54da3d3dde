// What the warps of this format's kernels do beside the shared primitives.

#pragma once

#include "mma.cuh"
#include "scalars.cuh"

constexpr Word kAll = 0xffffffff;  // lanes

__device__ constexpr bool is_half(const __half*) { return true; }
__device__ constexpr bool is_half(const __nv_bfloat16*) { return false; }

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word pair_of(float first, float second, const __half*) { return bits_of(__floats2half2_rn(first, second)); }
__device__ __forceinline__ Word pair_of(float first, float second, const __nv_bfloat16*) {
    return bits_of(__floats2bfloat162_rn(first, second));
}

// The low half of a word.
__device__ __forceinline__ __half scalar_of(Word bits, const __half*) { return __ushort_as_half(static_cast<unsigned short>(bits)); }
__device__ __forceinline__ __nv_bfloat16 scalar_of(Word bits, const __nv_bfloat16*) {
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

// `count` words from a place that is aligned to them, or to 16 bytes.
template <int count> __device__ __forceinline__ void read_words(Word* words, const void* place) {
    if constexpr (count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            const uint4 part = __ldg(static_cast<const uint4*>(place) + i);
            words[4 * i] = part.x;
            words[4 * i + 1] = part.y;
            words[4 * i + 2] = part.z;
            words[4 * i + 3] = part.w;
        }
    } else {
        static_assert(count == 2, "two words or fours");
        const uint2 part = __ldg(static_cast<const uint2*>(place));
        words[0] = part.x;
        words[1] = part.y;
    }
}

// Loads that stay before a __syncwarp: the assembler puts others where registers are free, after what waits for memory.
template <int count> __device__ __forceinline__ void load_words(Word (&words)[count], const Word* place) {
    static_assert(count == 2 || count == 4, "what one load brings");
    if constexpr (count == 2) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(place) : "memory");
    } else {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(place) : "memory");
    }
}

__device__ __forceinline__ Word load(const unsigned char* place) {
    Word value;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ Word load(const unsigned short* place) {
    Word value;
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

// sums[16, 8] += a[16, 32] b[32, 8], a in bytes without a sign, b with one; registers as in mma.cuh, with twice the columns.
__device__ __forceinline__ void mma(int (&sums)[4], const Word (&a)[4], Word b0, Word b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether this warp is the last of others + 1 to come here; what all of them wrote before is then to be seen. Leaves 0.
__device__ __forceinline__ bool is_last(int* arrivals, int others) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
        if (before == others) *arrivals = 0;
    }
    return __shfl_sync(0xffffffffu, before, 0) == others;
}

// A constant for a loop, by way of a number above 0 that the compiler does not know: it would make others anew at each use.
__device__ __forceinline__ Word kept_constant(Word value, int positive) { return value + (positive >> 31); }
