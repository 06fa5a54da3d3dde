// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a packed weight and any m: each weight is expanded once for all tokens of a tile,
// into the registers from which Hopper's wgmma takes its first operand.
//
// wgmma's fragment of 16 rows is that of mma.m16n8k16: a consumer warp expands tiles of 16 rows by 256 columns, a slice of four
// k-steps of 16 columns while the tensor cores compute the slice before. x is the operand in shared memory, with its columns in
// the order of the fragments: permute_x.cu stores it so, swizzled.
//
// CTA tile: TILE_M tokens by WARPGROUPS * 64 rows of w; a cluster has CLUSTER such tiles along N and multicasts x among them.
// With SPLIT_IN_CLUSTER a cluster is the SPLIT_K ranges of an output tile instead.
// Grid: CLUSTER times the ranges of stream_k.cuh, which divides the work.
// CTA: WARPGROUPS consumer warpgroups (expand and wgmma), and PRODUCERS producer warpgroups: their first warp issues bulk copies of
// x, the others copy weights. setmaxnreg moves registers to the consumers.
//
// Dynamic shared memory, in bytes:
//   X_STAGES x tiles, each four slices of 64 columns with a full and an empty mbarrier of their own    512 TILE_M each
//   STAGES stages of one weight tile per consumer warp                                   Weights::kTileBytes per tile
//   Weights::kExtraBytes, then 16 per stage of weights and per slice of x: the mbarriers; with SPLIT_IN_CLUSTER 8 per warp
//   In the end, with SPLIT_IN_CLUSTER, from the start of x: the partials of this CTA's share
//
// A format defines a type Weights, its operands:
//   kTileBytes, kExtraBytes             see above
//   kProducerRegisters                  per thread of a producer warpgroup, a multiple of 8
//   kProducers                          arrivals on each stage's full mbarrier
//   produce(memory, work, first, last, warp, lane)    copies tiles of the iterations from `first` to before `last`, which the
//                                       kProducerWarps warps share
//   Stream(weights, memory, work, first, last, warp, lane)      a consumer warp's tiles, in the order of its iterations:
//     acquire(iteration)                waits for a tile; returns an object whose expand<step>(fragment) is called step by step
//     release(iteration)                the tile has been expanded
//
// Compiled for sm_90a with SCALAR (__half or __nv_bfloat16), TILE_M (16, 32, 160, or a multiple of 64 up to 256), WARPGROUPS,
// CLUSTER, SPLIT_K (0: Stream-K), STAGES, X_STAGES, CTAS_PER_SM, PRODUCERS (1 if not defined), SPLIT_IN_CLUSTER (0 if not defined). With EXPERTS (stream_k.cuh) SPLIT_K is 0.

#pragma once

#ifndef PRODUCERS
#define PRODUCERS 1
#endif

#include "arrive_warp.cuh"
#include "expand_gemm/pipeline.cuh"
#include "expand_gemm/stream_k.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;
constexpr int kProducerThreads = PRODUCERS * 128;                    // setmaxnreg is per warpgroup: producers are whole ones
constexpr int kThreads = kConsumerThreads + kProducerThreads;

// Registers per thread at launch; setmaxnreg then gives the consumers what the producers leave. 4,096 registers of an
// SM stay free for a CTA of permute_x.cu, beside which this kernel's CTAs start and fetch weights. Two exceptions take all
// registers: three warpgroups of 128 tokens, which need them, and EXPERTS, whose CTAs start after permute_pairs.cu. Up to 64
// tokens __launch_bounds__ keeps within kRegisters; above, __maxnreg__ is needed, which also limits what ptxas gives the
// consumers.
constexpr bool kAllRegisters = EXPERTS || (TILE_M >= 128 && WARPGROUPS == 3);
constexpr int kRegisters = (65536 - (kAllRegisters ? 0 : 4096)) / CTAS_PER_SM / kThreads / 8 * 8;
#if TILE_M >= 128 && WARPGROUPS < 3
#define EXPAND_GEMM_BOUNDS __maxnreg__(kRegisters)
#else
#define EXPAND_GEMM_BOUNDS __launch_bounds__(kThreads, CTAS_PER_SM)
#endif
constexpr int kClusterCtas = SPLIT_IN_CLUSTER ? SPLIT_K : CLUSTER;
constexpr int kMostRegisters = 256;                                  // maximum that setmaxnreg is given
constexpr int kXSlices = 4;                                           // per tile, 64 columns each
constexpr int kXSliceBytes = TILE_M * 128;
constexpr int kXBytes = kXSlices * kXSliceBytes;
constexpr int kReleases = kConsumerWarps * kArrivalsPerWarp;         // arrivals that release a stage
constexpr int kProducerWarps = 4 * PRODUCERS - 1;                    // that copy weights
constexpr int kSliceSteps = kSteps / kXSlices;                       // k-steps of wgmma per slice of x

using Fragments = Word[2][kSliceSteps][4];  // wgmma reads one slice's while the other's are expanded

// Where weight tiles are in shared memory: stage by stage, one per consumer warp.
struct StreamMemory {
    Word tiles;         // address of stage 0
    Word extra;         // Weights::kExtraBytes
    Pipeline pipeline;  // of the stages
};

// Arrives on the slice's empty mbarrier in every CTA of the cluster, since each multicasts a share of the slice.
__device__ __forceinline__ void release_slice(Word empty, int lane) {
    if constexpr (CLUSTER > 1) {
        mbarrier_arrive_warp_cluster<CLUSTER>(empty, lane);
    } else {
        mbarrier_arrive_warp(empty, lane);
    }
}

// Expands the k-steps of a slice.
template <int slice, int step = 0, typename Tile>
__device__ __forceinline__ void expand_slice(Word (&weights)[kSliceSteps][4], Tile& tile) {
    tile.template expand<kSliceSteps * slice + step>(weights[step]);
    if constexpr (step + 1 < kSliceSteps) expand_slice<slice, step + 1>(weights, tile);
}

// One iteration: each slice of four k-steps is expanded while wgmma computes the slice before. `x` is the descriptor's low word
// of the x stage. `previous` is the x stage of the iteration before, whose last slice is still being read; negative if there
// was none. `begins`: this is the output tile's first iteration, so the accumulators are overwritten.
template <int slice = 0, typename Tile>
__device__ __forceinline__ void wgmma_tile(Accumulators& accumulators, Fragments& fragments, Tile& tile, Pipeline pipeline, Word x,
                                           PipelineState<X_STAGES> state, int previous, bool begins, int lane) {
    Word(&weights)[kSliceSteps][4] = fragments[slice % 2];
    expand_slice<slice>(weights, tile);
    mbarrier_wait_parity(pipeline.full(state.stage * kXSlices + slice), state.parity);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSliceSteps; ++step)
        wgmma_m64k16(accumulators, weights[step], x + slice * kXSliceBytes / 16 + step * 2, slice || step || !begins,
                     static_cast<const SCALAR*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if constexpr (slice > 0) {  // the slice before is no longer read
        release_slice(pipeline.empty(state.stage * kXSlices + slice - 1), lane);
    } else {
        if (previous >= 0) release_slice(pipeline.empty(previous * kXSlices + kXSlices - 1), lane);
    }
    if constexpr (slice + 1 < kXSlices)
        wgmma_tile<slice + 1>(accumulators, fragments, tile, pipeline, x, state, previous, begins, lane);
}

// The producer of x: one thread; each CTA of a cluster multicasts its share of a slice.
__device__ __forceinline__ void load_x(Pipeline pipeline, Word stages, const unsigned char* x, WorkRanges work, int first,
                                       int last) {
    constexpr int kShare = kXSliceBytes / CLUSTER;
    const int mine = CLUSTER > 1 ? static_cast<int>(cluster_ctarank()) * kShare : 0;
    PipelineState<X_STAGES> state;
    for (int iteration = first; iteration < last; ++iteration, state.advance()) {
        const long long tile =
            static_cast<long long>(work.m_tile(work.tile(iteration))) * work.column_tiles + work.column(iteration);
        const unsigned char* from = x + tile * kXBytes + mine;
#pragma unroll 1
        for (int slice = 0; slice < kXSlices; ++slice) {
            const int at = state.stage * kXSlices + slice;
            mbarrier_wait_parity(pipeline.empty(at), state.parity ^ 1);
            mbarrier_arrive_expect_tx(pipeline.full(at), kXSliceBytes);
            if constexpr (CLUSTER > 1) {
                cp_async_bulk_multicast(stages + at * kXSliceBytes + mine, from + slice * kXSliceBytes, kShare,
                                        pipeline.full(at), (1 << CLUSTER) - 1);
            } else {
                cp_async_bulk(stages + at * kXSliceBytes, from + slice * kXSliceBytes, kShare, pipeline.full(at));
            }
        }
    }
}

// The kernel's operands except its weights.
struct Operands {
    const unsigned char* x;  // as permute_x.cu stores it
    const SCALAR* bias;      // [n] or null
    SCALAR* y;               // [m, n]
    Workspace workspace;
    int m, n, row_tiles, column_tiles;  // with EXPERTS row_tiles and n are those of an expert, and m is not used
    Jobs jobs = {};                     // with EXPERTS
};

// A consumer warp: expands and multiplies its rows of every output tile of the range, and stores them.
template <typename Weights>
__device__ __forceinline__ void consume(const Weights& weights, const Operands& operands, StreamMemory memory, Pipeline x_pipeline,
                                        Word x_stages, const Received& received, WorkRanges work, int range, int first, int last,
                                        int warp, int lane) {
    Accumulators accumulators;
    Fragments fragments;
    typename Weights::Stream stream(weights, memory, work, first, last, warp, lane);
    PipelineState<X_STAGES> x_state;
    int previous = -1;
#pragma unroll 1
    for (int iteration = first; iteration < last;) {
        const int tile = work.tile(iteration), begin = iteration, end = min(last, work.end(tile));
#pragma unroll 1
        for (; iteration < end; ++iteration, x_state.advance()) {
            auto expander = stream.acquire(iteration);
            wgmma_tile(accumulators, fragments, expander, x_pipeline, smem_descriptor_low(x_stages + x_state.stage * kXBytes),
                       x_state, previous, iteration == begin, lane);
            stream.release(iteration);
            previous = x_state.stage;
        }
        wgmma_wait_group<0>();
        const int first_row = (work.row_tile(tile) + warp) * kTileRows;
        const int m_tile = work.m_tile(tile);
        const SCALAR* bias = operands.bias;
        if (EXPERTS && bias) bias += static_cast<long long>(operands.jobs.experts[m_tile]) * operands.n;
        const WarpOutput output(operands.y, bias, operands.jobs.pairs, m_tile * TILE_M, first_row, operands.m, operands.n, lane);
        reduce_and_store(accumulators, work, operands.workspace, received, output, tile, begin, range, warp, lane);
    }
}

// The whole kernel: `shared` is its dynamic shared memory, aligned to 1,024 bytes.
template <typename Weights>
__device__ __forceinline__ void expand_gemm(const Weights& weights, const Operands& operands, unsigned char* shared) {
    constexpr int kWeightBytes = STAGES * kConsumerWarps * Weights::kTileBytes;
    griddepcontrol_launch_dependents();
    const int lane = threadIdx.x % kWarpSize;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);  // warp-uniform for the compiler
    const WorkRanges work = make_ranges(operands.m, operands.row_tiles, operands.column_tiles, operands.jobs);
    const int range = blockIdx.x / CLUSTER;
    const int first = work.first(range), last = work.first(range + 1);
    const Word x_stages = smem_address(shared);
    const Word weight_stages = x_stages + X_STAGES * kXBytes;
    const Word extra = weight_stages + kWeightBytes, mbarriers = extra + Weights::kExtraBytes;
    const Pipeline x_pipeline{mbarriers}, weight_pipeline{mbarriers + X_STAGES * kXSlices * 16};
    const StreamMemory memory{weight_stages, extra, weight_pipeline};
    const Received received{x_stages, mbarriers + (X_STAGES * kXSlices + STAGES) * 16};
    static_assert(kReceivedBytes <= X_STAGES * kXBytes + kWeightBytes, "the received partials do not fit");
    // One thread initialises all mbarriers. Where a thread of a warp initialised each of its own, racecheck reported them (sanitizers.md).
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES * kXSlices; ++i) {
            mbarrier_init(x_pipeline.full(i), 1), mbarrier_init(x_pipeline.empty(i), CLUSTER * kReleases);
        }
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(weight_pipeline.full(i), Weights::kProducers), mbarrier_init(weight_pipeline.empty(i), kReleases);
        }
        if (SPLIT_IN_CLUSTER) {
            for (int i = 0; i < kConsumerWarps; ++i) mbarrier_init(received.mbarrier(i), 1);
        }
        fence_mbarrier_init();
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();
    else __syncthreads();

    if (warp >= kConsumerWarps) {
        setmaxnreg_dec<Weights::kProducerRegisters>();
        if (warp > kConsumerWarps) weights.produce(memory, work, first, last, warp - kConsumerWarps - 1, lane);
        if (lane == 0 && warp == kConsumerWarps) {
            griddepcontrol_wait();
            load_x(x_pipeline, x_stages, operands.x, work, first, last);
        }
        __syncwarp();
        if constexpr (SPLIT_IN_CLUSTER) barrier_cluster_sync();  // that of exchange_in_cluster
    } else {
        constexpr int kLeft = (kRegisters * kThreads - Weights::kProducerRegisters * kProducerThreads) / kConsumerThreads / 8 * 8;
        setmaxnreg_inc<kLeft < kMostRegisters ? kLeft : kMostRegisters>();
        if (SPLIT_IN_CLUSTER && lane == 0) received.expect(warp);
        consume(weights, operands, memory, x_pipeline, x_stages, received, work, range, first, last, warp, lane);
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();  // a CTA must not exit while another may multicast into it
}
