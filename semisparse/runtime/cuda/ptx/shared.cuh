// ld.shared, st.shared and addresses in shared memory.

#pragma once

#include "word.cuh"

// The shared-memory address of a generic pointer (cvta.to.shared).
__device__ __forceinline__ Word smem_address(const void* pointer) {
    return static_cast<Word>(__cvta_generic_to_shared(pointer));
}

// ld.shared.u32 at address + offset. All functions here are volatile asm: the compiler keeps their order.
template <int offset = 0>
__device__ __forceinline__ Word ld_shared(Word address) {
    Word value;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(value) : "r"(address), "n"(offset));
    return value;
}

__device__ __forceinline__ uint4 ld_shared_v4(Word address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ void st_shared_v4(Word address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" : : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void st_shared_u16(Word address, unsigned short value) {
    asm volatile("st.shared.u16 [%0], %1;" : : "r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void st_shared(Word address, Word value) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_u8(Word address, char value) {
    asm volatile("st.shared.u8 [%0], %1;" : : "r"(address), "r"(static_cast<Word>(value)) : "memory");
}

// ld.shared with a memory clobber: the compiler does not move these loads before earlier C++ stores or barriers.
__device__ __forceinline__ void ld_shared_ordered(Word (&words)[2], Word address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared_ordered(Word (&words)[4], Word address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ Word ld_shared_ordered(Word address) {
    Word value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ Word ld_shared_ordered_u16(Word address) {
    Word value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ Word ld_shared_ordered_u8(Word address) {
    Word value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_v4(Word address, const Word (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
        : : "r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
