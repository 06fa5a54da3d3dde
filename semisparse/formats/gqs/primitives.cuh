// The conversions and the tensor-core product that the kernel here is made of.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Word = unsigned int;

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }

// sums += a * b for m16n8k16; of a the registers are rows 0 to 7 and 8 to 15 of columns 0 to 7, then of 8 to 15.
__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&a)[4], Word b0, Word b1, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
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

// Keeps a number that is used in a loop from being made anew at each use: the assembler cannot see through a shuffle.
__device__ __forceinline__ void keep_in_register(Word& value) {
    value = __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// Copies to shared memory in multiples of 16 bytes, by one lane on Hopper and later, else by all.

struct Arrival {
    unsigned long long barrier;
};

__device__ __forceinline__ Word shared_place(const void* place) { return static_cast<Word>(__cvta_generic_to_shared(place)); }

template <int count> __device__ __forceinline__ void start_arrivals(Arrival (&arrivals)[count]) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
        for (Arrival& arrival : arrivals) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_place(&arrival)) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
    }
    __syncwarp();
#endif
}

#if __CUDA_ARCH__ >= 900
// Whether this is the lane of the warp that acts for all: of a branch on it the assembler knows that one lane takes it.
__device__ __forceinline__ bool elected() {
    int is = 0;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(is));
    return is;
}

__device__ __forceinline__ void copy_bulk(Word arrival, char* to, const char* from, int bytes) {
    if (bytes <= 0) return;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        : : "r"(shared_place(to)), "l"(from), "r"(bytes), "r"(arrival) : "memory");
}
#else
__device__ __forceinline__ void copy_units(char* to, const char* from, int bytes) {
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_place(to + i)), "l"(from + i) : "memory");
    }
}
#endif

__device__ __forceinline__ void copy_async(
    Arrival& arrival, char* to0, const char* from0, int bytes0, char* to1, const char* from1, int bytes1, char* to2,
    const char* from2, int bytes2
) {
#if __CUDA_ARCH__ >= 900
    if (elected()) {
        const Word place = shared_place(&arrival);
        const int bytes = bytes0 + bytes1 + bytes2;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(place), "r"(bytes) : "memory");
        copy_bulk(place, to0, from0, bytes0);
        copy_bulk(place, to1, from1, bytes1);
        copy_bulk(place, to2, from2, bytes2);
    }
#else
    copy_units(to0, from0, bytes0);
    copy_units(to1, from1, bytes1);
    copy_units(to2, from2, bytes2);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits for the copies of an arrival, used for the round-th time modulo 2; `pending` were committed since.
template <int pending> __device__ __forceinline__ void wait_for_copies(Arrival& arrival, Word round) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again%=;}"
        : : "r"(shared_place(&arrival)), "r"(round) : "memory");
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
#endif
}
