// The kernels of test_instructions.py: each loads operands, executes one or a few instructions of runtime/cuda/ptx, or intrinsics,
// and stores the results. A CTA has 32 threads, and 128 for wgmma. There is one CTA, except in instruction_bulk and
// instruction_order.
//
// Macros: ELEMENT (of mma, wgmma and wgmma_sparse_registers), CLUSTER (CTAs per cluster), COLUMNS (N of wgmma and wgmma_sparse); and for
// wgmma_sparse SPARSE_ELEMENT, ACCUMULATOR (int or float) and SELECTOR (which lanes' metadata are read).

#include "ptx/bar.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/cvt.cuh"
#include "ptx/global.cuh"
#include "ptx/integer.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

#ifndef ELEMENT
#define ELEMENT __half
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif

extern __shared__ __align__(1024) uint4 shared[];

// Fragments are [32 lanes, words].
extern "C" __global__ void instruction_mma(const Word* a, const Word* b, float* d) {
    const int lane = threadIdx.x;
    Word fragment[4];
    float accumulators[4];
    for (int i = 0; i < 4; ++i) fragment[i] = a[4 * lane + i], accumulators[i] = d[4 * lane + i];
    mma_m16n8k16(accumulators, fragment, b[2 * lane], b[2 * lane + 1], static_cast<const ELEMENT*>(nullptr));
    for (int i = 0; i < 4; ++i) d[4 * lane + i] = accumulators[i];
}

extern "C" __global__ void instruction_mma_8_bits(const Word* a, const Word* b, int* d) {
    const int lane = threadIdx.x;
    Word fragment[4];
    int accumulators[4];
    for (int i = 0; i < 4; ++i) fragment[i] = a[4 * lane + i], accumulators[i] = d[4 * lane + i];
    mma_m16n8k32_u8_s8(accumulators, fragment, b[2 * lane], b[2 * lane + 1]);
    for (int i = 0; i < 4; ++i) d[4 * lane + i] = accumulators[i];
}

// from: [4 matrices, 8 rows, 8] of 16 bits; to: [32 lanes, 4 words]; back: shaped as `from`,
// which it equals: the words are stored again by stmatrix_x4_trans.
extern "C" __global__ void instruction_ldmatrix(const uint4* from, Word* to, uint4* back) {
    const int lane = threadIdx.x;
    shared[lane] = from[lane];
    __syncwarp();
    Word words[4];
    ldmatrix_x4_trans(words, smem_address(shared + lane));
    for (int i = 0; i < 4; ++i) to[4 * lane + i] = words[i];
    stmatrix_x4_trans(smem_address(shared + 32 + lane), words);
    __syncwarp();
    back[lane] = shared[32 + lane];
}

extern "C" __global__ void instruction_movmatrix(const Word* from, Word* to) {
    to[threadIdx.x] = movmatrix_trans(from[threadIdx.x]);
}

// to: [32, 6]: what each instruction makes of a, b and c.
extern "C" __global__ void instruction_integers(const Word* a, const Word* b, const Word* c, Word* to) {
    const int i = threadIdx.x;
    Word* d = to + 6 * i;
    d[0] = prmt(a[i], b[i], c[i]);
    d[1] = __byte_perm(a[i], b[i], c[i]);
    d[2] = __funnelshift_l(a[i], b[i], c[i]);
    d[3] = __funnelshift_r(a[i], b[i], c[i]);
    d[4] = __dp4a(a[i], b[i], c[i]);
    d[5] = mad_lo(a[i], b[i], c[i]);
}

extern "C" __global__ void instruction_cvt(const float* from, unsigned short* to) {
    to[threadIdx.x] = cvt_e4m3x2(from[2 * threadIdx.x], from[2 * threadIdx.x + 1]);
}

// to: [32, 8 words]: 4 words, of which the first lane % 5 are copied and the others are zero; 2 words and 1 word, copied by
// cp.async of 8 and 4 bytes; and the number 7.
extern "C" __global__ void instruction_cp_async(const uint4* from, uint4* to) {
    const int lane = threadIdx.x;
    const Word at = smem_address(shared + 2 * lane);
    cp_async_16(at, from + lane, 4 * (lane % 5));
    cp_async<8>(at + 16, from + lane);
    cp_async_commit_group();
    cp_async<4>(at + 24, reinterpret_cast<const Word*>(from + lane) + 2);
    cp_async_commit_group();
    st_shared(at + 28, 7);
    cp_async_wait_group<0>();
    to[2 * lane] = shared[2 * lane];
    to[2 * lane + 1] = ld_shared_v4(at + 16);
}

// Each CTA of a cluster sends its 64 words to all. to: [CTAs, CLUSTER * 64].
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) instruction_bulk(const Word* from, Word* to) {
    // CLUSTER * 64 words, then an mbarrier.
    const Word base = smem_address(shared), full = base + CLUSTER * 256;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(full, CLUSTER * 256);
    }
    barrier_cluster_sync();
    if (threadIdx.x == 0)
        cp_async_bulk_multicast(base + cluster_ctarank() * 256, from + blockIdx.x * 64, 256, full, (1 << CLUSTER) - 1);
    mbarrier_wait_parity(full, 0);
    for (int i = threadIdx.x; i < CLUSTER * 64; i += 32) to[blockIdx.x * CLUSTER * 64 + i] = reinterpret_cast<const Word*>(shared)[i];
    barrier_cluster_sync();
}

// Every CTA appends its number to the digits of `to` after all CTAs with higher numbers.
extern "C" __global__ void instruction_order(int* counter, int* to) {
    if (threadIdx.x) return;
    while (ld_acquire_gpu(counter) < static_cast<int>(gridDim.x - 1 - blockIdx.x)) {}
    *to = *to * 10 + blockIdx.x;
    red_release_gpu_increment(counter);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#ifndef COLUMNS
#define COLUMNS 64
#endif

// a: [128 threads, 4 words], a fragment of [64, 16] per warpgroup; b: [COLUMNS, 64] of 16 bits, K-major, of which K from
// 16 * step to 16 * step + 15 is multiplied; the kernel stores it to shared memory in 128-byte swizzle; d: [128, COLUMNS / 2].
extern "C" __global__ void instruction_wgmma(const Word* a, const uint4* b, float* d, int step, int scale) {
    const int thread = threadIdx.x;
    for (int i = thread; i < COLUMNS * 8; i += 128) shared[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = b[i];
    fence_proxy_async();
    __syncthreads();
    Word fragment[4];
    float accumulators[COLUMNS / 2];
    for (int i = 0; i < 4; ++i) fragment[i] = a[4 * thread + i];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) accumulators[i] = d[thread * (COLUMNS / 2) + i];
    wgmma_fence();
    wgmma_m64k16(accumulators, fragment, smem_descriptor_low(smem_address(shared)) + 2 * step, scale,
                 static_cast<const ELEMENT*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[thread * (COLUMNS / 2) + i] = accumulators[i];
}

// a: [128, 4 words], the kept half of [64, 32]; metadata: [128]; b: [K = 32, N = 128] of 16 bits;
// the kernel stores it to shared memory as two halves of 64 columns in 128-byte swizzle; d: [128, 64].
extern "C" __global__ void instruction_wgmma_sparse_registers(const Word* a, const Word* metadata, const uint4* b, float* d) {
    const int thread = threadIdx.x;
    for (int i = thread; i < 32 * 16; i += 128) {
        const int row = i / 16, unit = i % 16;
        shared[unit / 8 * 256 + row * 8 + (unit % 8 ^ row % 8)] = b[i];
    }
    fence_proxy_async();
    __syncthreads();
    Word fragment[4];
    float accumulators[64];
    for (int i = 0; i < 4; ++i) fragment[i] = a[4 * thread + i];
#pragma unroll
    for (int i = 0; i < 64; ++i) accumulators[i] = d[thread * 64 + i];
    wgmma_fence();
    wgmma_sp_m64n128k32(accumulators, fragment, smem_descriptor(smem_address(shared), 32 * 128, 1024, kSwizzle128),
                        metadata[thread], static_cast<const ELEMENT*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) d[thread * 64 + i] = accumulators[i];
}

#ifdef SPARSE_ELEMENT
// a: [64 rows, 32 bytes], the kept half of 64 bytes of K, without swizzle; b: [COLUMNS, 128 bytes], of which the first 64 are
// multiplied; the kernel stores it to shared memory in 128-byte swizzle; metadata: [128]; d: [128, COLUMNS / 2].
extern "C" __global__ void instruction_wgmma_sparse(const uint4* a, const Word* metadata, const uint4* b, ACCUMULATOR* d) {
    const int thread = threadIdx.x;
    uint4* weights = shared + COLUMNS * 8;
    for (int i = thread; i < COLUMNS * 8; i += 128) shared[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = b[i];
    for (int i = thread; i < 64 * 2; i += 128) weights[i % 2 * 64 + i / 2] = a[i];
    fence_proxy_async();
    __syncthreads();
    ACCUMULATOR accumulators[COLUMNS / 2];
    wgmma_fence();
    wgmma_sp_m64<SELECTOR>(accumulators, smem_descriptor(smem_address(weights), 1024, 128, kNoSwizzle),
                           smem_descriptor(smem_address(shared), 16, 1024, kSwizzle128), metadata[thread], 0,
                           static_cast<const SPARSE_ELEMENT*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) d[thread * (COLUMNS / 2) + i] = accumulators[i];
}
#endif

#endif
