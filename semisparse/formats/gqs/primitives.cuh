// What the warps of this format's kernels do beside the shared primitives.

#pragma once

#include "dependent.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "prefetch.cuh"
#include "scalars.cuh"

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

// Shared memory by its own addresses: pointers into it would be made anew at each use.
__device__ __forceinline__ void read_shared(Word (&words)[2], Word at) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at) : "memory");
}

__device__ __forceinline__ void read_shared(Word (&words)[4], Word at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ Word read_shared_word(Word at) {
    Word value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ Word read_shared_half(Word at) {
    Word value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ Word read_shared_byte(Word at) {
    Word value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

__device__ __forceinline__ void write_shared(Word at, const Word (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
        : : "r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

__device__ __forceinline__ void write_shared(Word at, Word value) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void write_shared_byte(Word at, char value) {
    asm volatile("st.shared.u8 [%0], %1;" : : "r"(at), "r"(static_cast<Word>(value)) : "memory");
}

// The same number, of which the compiler knows nothing: it would make three sums of what is added to it three times scaled.
__device__ __forceinline__ Word opaque(Word value) {
    asm("" : "+r"(value));
    return value;
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

// sums[16, 8] += a[16, 32] b[32, 8], a in bytes without a sign, b with one; registers as in mma.cuh, with twice the columns.
__device__ __forceinline__ void mma(int (&sums)[4], const Word (&a)[4], Word b0, Word b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The number of this warp in its block; the compiler knows that all lanes have it.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(kAll, static_cast<int>(threadIdx.x / 32), 0); }

// The place `count` times `bytes` further, by one instruction.
__device__ __forceinline__ const char* further(const char* place, Word count, Word bytes) {
    unsigned long long found;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(found) : "r"(count), "r"(bytes), "l"(place));
    return reinterpret_cast<const char*>(found);
}

// a * b + c on the pipe of the multipliers, where the compiler would shift on the one for bits, which is the busier one.
__device__ __forceinline__ Word times_plus(Word a, Word b, Word c) {
    Word found;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}

// The same in all lanes, as the compiler knows.
__device__ __forceinline__ bool any_of_warp(bool value) { return __any_sync(kAll, value); }
__device__ __forceinline__ Word max_of_warp(Word value) { return __reduce_max_sync(kAll, value); }

// A constant for a loop, by way of a number above 0 that the compiler does not know: it would make others anew at each use.
__device__ __forceinline__ Word kept_constant(Word value, int positive) { return pinned(value + (positive >> 31)); }

// Whether this lane is the one of its warp that does what one does.
__device__ __forceinline__ bool one_of_warp() {
#if __CUDA_ARCH__ >= 900
    Word chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
#else
    return threadIdx.x % 32 == 0;
#endif
}
