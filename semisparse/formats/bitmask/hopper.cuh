// What Hopper adds: barriers that count bytes, bulk copies, asynchronous products of a warpgroup; and blocks that wait for one another.

#pragma once

#include "tiled.cuh"

namespace barrier {

__device__ __forceinline__ void init(Word at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

__device__ __forceinline__ void arrive(Word at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(at) : "memory");
}

// Arrives, and has the phase last until so many bytes have been copied.
__device__ __forceinline__ void expect(Word at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(Word at, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        : : "r"(at), "r"(parity) : "memory");
}

}  // namespace barrier

// One thread's request; the barrier is told of the bytes.
__device__ __forceinline__ void copy_bulk(Word to, const void* from, int bytes, Word told) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        : : "r"(to), "l"(from), "r"(bytes), "r"(told) : "memory");
}

// A matrix in shared memory whose rows of 128 bytes have their 16-byte units exchanged in groups of 8 rows: the low half of
// what wgmma is told, which moves on by 1 for 16 bytes; the high half is always the same.
__device__ __forceinline__ Word describe(Word address) { return address >> 4 | 1u << 16; }
constexpr Word kSwizzled = 64 | 1u << 30;  // 1,024 bytes from 8 rows to the next 8; 128-byte swizzle

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

template <int open>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(open) : "memory");
}

#define SUMS_OF_8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])

// sums += w * x for 64 rows and 32 tokens; `w` is the fragment that mma.m16n8k16 takes, of a warp's 16 rows.
#define PRODUCT_OF_32(TYPE)                                                                                               \
    asm volatile("{\n.reg .pred adds;\n.reg .b64 x;\nsetp.ne.b32 adds, %21, 0;\nmov.b64 x, {%20, %22};\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14," \
        "%15}, {%16,%17,%18,%19}, x, adds, 1, 1, 0;\n}"                                                                  \
        : SUMS_OF_8(0), SUMS_OF_8(8)                                                                                       \
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x), "r"(adds), "n"(kSwizzled))

#define PRODUCT_OF_64(TYPE)                                                                                               \
    asm volatile("{\n.reg .pred adds;\n.reg .b64 x;\nsetp.ne.b32 adds, %37, 0;\nmov.b64 x, {%36, %38};\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14," \
        "%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, x, adds, 1, 1, 0;\n}"  \
        : SUMS_OF_8(0), SUMS_OF_8(8), SUMS_OF_8(16), SUMS_OF_8(24)                                                         \
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x), "r"(adds), "n"(kSwizzled))

__device__ __forceinline__ void multiply_async(float (&sums)[16], const Word (&w)[4], Word x, int adds,
                                               const __half*) { PRODUCT_OF_32("f16"); }
__device__ __forceinline__ void multiply_async(float (&sums)[16], const Word (&w)[4], Word x, int adds,
                                               const __nv_bfloat16*) { PRODUCT_OF_32("bf16"); }
__device__ __forceinline__ void multiply_async(float (&sums)[32], const Word (&w)[4], Word x, int adds,
                                               const __half*) { PRODUCT_OF_64("f16"); }
__device__ __forceinline__ void multiply_async(float (&sums)[32], const Word (&w)[4], Word x, int adds,
                                               const __nv_bfloat16*) { PRODUCT_OF_64("bf16"); }

#undef PRODUCT_OF_64
#undef PRODUCT_OF_32
#undef SUMS_OF_8

// A warpgroup's registers a thread; together they have what the block began with.
template <int count>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(count)); }
template <int count>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(count)); }

// Counts this block in, once its threads have met after writing.
__device__ __forceinline__ void count_in(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(counter) : "memory");
}

// Waits until so many blocks have been counted in.
__device__ __forceinline__ void wait_for_blocks(const int* counter, int blocks) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    while (found < blocks);
}
