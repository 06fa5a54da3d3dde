// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a bitmask weight in the layout `tiles` and any m, with Hopper's wgmma.
//
// The weights are the operand in registers: wgmma's fragment of 16 rows is that of mma.m16n8k16, so each consumer warp expands
// the same tiles as decode.cu, one k-step of 16 columns while the tensor cores compute the steps before. x is the operand in
// shared memory, with its columns in the order of the fragments: permute_x.cu stores it so, swizzled.
//
// CTA tile: TILE_M tokens by WARPGROUPS * 64 rows of w; a cluster has CLUSTER such tiles of rows and multicasts x among them.
// Grid: CLUSTER times the ranges of stream_k.cuh, which divides the work.
// CTA: WARPGROUPS consumer warpgroups (expand and wgmma), and one producer warpgroup of which two warps issue bulk copies, one
// of weights and one of x. setmaxnreg moves registers to the consumers.
//
// Dynamic shared memory, in bytes:
//   X_STAGES x tiles, each four slices of 64 columns with a full and an empty mbarrier of their own    512 TILE_M each
//   STAGES stages of one weight tile per consumer warp                               WARPGROUPS * 4 * kTileBytes each
//   kOverrun, then 16 per stage of weights and per slice of x: the mbarriers
//
// Bound at 28672 x 8192, m = 256, by the tensor cores at the card's power limit (79 % busy, 1.55 GHz); at m = 64 nothing is
// full (issue 53 %, ALU 47 %, DRAM 55 %). README.md has the figures.
//
// Compiled for sm_90a with SCALAR (__half or __nv_bfloat16), KEEP (values per block), TILE_M (32, or a multiple of 64 up to
// 256), WARPGROUPS, CLUSTER, SPLIT_K (0: Stream-K), STAGES, X_STAGES, CTAS_PER_SM.

#include "arrive_warp.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "stream_k.cuh"
#include "tile.cuh"

constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;
constexpr int kThreads = kConsumerThreads + 128;                     // setmaxnreg is per warpgroup: the producer is a whole one
constexpr int kRegisters = 65536 / CTAS_PER_SM / kThreads / 8 * 8;   // per thread at launch
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = (kRegisters * kThreads - kProducerRegisters * 128) / kConsumerThreads / 8 * 8;
constexpr int kSlices = 4;                                           // of 64 columns per tile
constexpr int kSliceBytes = TILE_M * 128;
constexpr int kXBytes = kSlices * kSliceBytes;
constexpr int kStageBytes = kConsumerWarps * kTileBytes;
constexpr int kMbarriers = X_STAGES * kXBytes + STAGES * kStageBytes + kOverrun;
constexpr int kInFlight = 2;                                         // wgmma groups in flight while a fragment is expanded

using Fragments = Word[2 * kInFlight][4];

// The current stage of a pipeline, and the parity that its mbarriers complete next.
template <int stages>
struct PipelineState {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The mbarriers of a pipeline's stages: `full` when the data has arrived, `empty` when all consumers have read it.
struct Pipeline {
    Word mbarriers;
    __device__ __forceinline__ Word full(int stage) const { return mbarriers + stage * 16; }
    __device__ __forceinline__ Word empty(int stage) const { return mbarriers + stage * 16 + 8; }
};

// Arrives on the slice's empty mbarrier of every CTA of the cluster: each multicasts a share of it.
__device__ __forceinline__ void release_slice(Word empty, int lane) {
    if constexpr (CLUSTER > 1) {
        mbarrier_arrive_warp_cluster<CLUSTER>(empty, lane);
    } else {
        mbarrier_arrive_warp(empty, lane);
    }
}

// One iteration: 16 k-steps, each expanded while wgmma computes the two before. `previous` is the x stage of the iteration
// before, whose last slice is still read at first; negative if there was none.
template <int step = 0>
__device__ __forceinline__ void wgmma_tile(Accumulators& accumulators, Fragments& fragments, TileExpander& tile,
                                           Pipeline pipeline, Word x, PipelineState<X_STAGES> state, int previous, bool begins,
                                           int lane) {
    constexpr int slice = step / 4;
    Word(&weights)[4] = fragments[step % (2 * kInFlight)];
    const uint2 a = tile.upper.expand<step>(), b = tile.lower.expand<step>();
    weights[0] = a.x, weights[1] = b.x, weights[2] = a.y, weights[3] = b.y;
    if (step % 4 == 0) mbarrier_wait_parity(pipeline.full(state.stage * kSlices + slice), state.parity);
    wgmma_fence();
    wgmma_m64k16(accumulators, weights, x + slice * kSliceBytes / 16 + step % 4 * 2, step || !begins,
                 static_cast<const SCALAR*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<kInFlight>();
    if constexpr (step == kInFlight - 1) {  // the last group that read the slice before has completed
        if (previous >= 0) release_slice(pipeline.empty(previous * kSlices + kSlices - 1), lane);
    } else if constexpr (step % 4 == kInFlight - 1) {
        release_slice(pipeline.empty(state.stage * kSlices + slice - 1), lane);
    }
    if constexpr (step + 1 < kSteps)
        wgmma_tile<step + 1>(accumulators, fragments, tile, pipeline, x, state, previous, begins, lane);
}

// The producer of weights: one thread, one bulk copy per consumer warp and iteration.
__device__ __forceinline__ void load_weights(Pipeline pipeline, Word stages, const unsigned char* tiles, WorkRanges work,
                                             int row_tiles, int first, int last) {
    PipelineState<STAGES> state;
    for (int iteration = first; iteration < last; ++iteration, state.advance()) {
        const int first_row_tile = work.row_tile(work.tile(iteration)), column = work.column(iteration);
        mbarrier_wait_parity(pipeline.empty(state.stage), state.parity ^ 1);
        mbarrier_arrive_expect_tx(pipeline.full(state.stage), kStageBytes);
#pragma unroll 1
        for (int i = 0; i < kConsumerWarps; ++i) {  // rows past the last tile repeat it; their accumulators are not stored
            const long long index =
                static_cast<long long>(min(first_row_tile + i, row_tiles - 1)) * work.column_tiles + column;
            cp_async_bulk(stages + state.stage * kStageBytes + i * kTileBytes, tiles + index * kTileBytes, kTileBytes,
                          pipeline.full(state.stage));
        }
    }
}

// The producer of x: one thread; each CTA of a cluster multicasts its share of a slice.
__device__ __forceinline__ void load_x(Pipeline pipeline, Word stages, const unsigned char* x, WorkRanges work, int first,
                                       int last) {
    constexpr int kShare = kSliceBytes / CLUSTER;
    const int mine = CLUSTER > 1 ? static_cast<int>(cluster_ctarank()) * kShare : 0;
    PipelineState<X_STAGES> state;
    for (int iteration = first; iteration < last; ++iteration, state.advance()) {
        const long long tile =
            static_cast<long long>(work.m_tile(work.tile(iteration))) * work.column_tiles + work.column(iteration);
        const unsigned char* from = x + tile * kXBytes + mine;
#pragma unroll 1
        for (int slice = 0; slice < kSlices; ++slice) {
            const int at = state.stage * kSlices + slice;
            mbarrier_wait_parity(pipeline.empty(at), state.parity ^ 1);
            mbarrier_arrive_expect_tx(pipeline.full(at), kSliceBytes);
            if constexpr (CLUSTER > 1) {
                cp_async_bulk_multicast(stages + at * kSliceBytes + mine, from + slice * kSliceBytes, kShare,
                                        pipeline.full(at), (1 << CLUSTER) - 1);
            } else {
                cp_async_bulk(stages + at * kSliceBytes, from + slice * kSliceBytes, kShare, pipeline.full(at));
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_bitmask_gemm(
    const unsigned char* __restrict__ x,        // as permute_x.cu stores it
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* partials,                           // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                              // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % kWarpSize;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);  // warp-uniform for the compiler
    const WorkRanges work = make_ranges(m, row_tiles, column_tiles);
    const int range = blockIdx.x / CLUSTER;
    const int first = work.first(range), last = work.first(range + 1);
    const Word x_stages = smem_address(shared);
    const Word weight_stages = x_stages + X_STAGES * kXBytes;
    const Pipeline x_pipeline{x_stages + kMbarriers}, weight_pipeline{x_stages + kMbarriers + X_STAGES * kSlices * 16};
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES * kSlices; ++i)
            mbarrier_init(x_pipeline.full(i), 1), mbarrier_init(x_pipeline.empty(i), CLUSTER * kConsumerWarps * kArrivalsPerWarp);
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(weight_pipeline.full(i), 1), mbarrier_init(weight_pipeline.empty(i), kConsumerWarps * kArrivalsPerWarp);
        fence_mbarrier_init();
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();
    else __syncthreads();

    if (warp >= kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters>();
        if (lane == 0 && warp == kConsumerWarps) {
            load_weights(weight_pipeline, weight_stages, tiles, work, row_tiles, first, last);
        } else if (lane == 0 && warp == kConsumerWarps + 1) {
            griddepcontrol_wait();
            load_x(x_pipeline, x_stages, x, work, first, last);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        const Workspace workspace{partials, counters};
        Accumulators accumulators;
        Fragments fragments;
        PipelineState<STAGES> state;
        PipelineState<X_STAGES> x_state;
        int previous = -1;
#pragma unroll 1
        for (int iteration = first; iteration < last;) {
            const int tile = work.tile(iteration), begin = iteration, end = min(last, work.end(tile));
#pragma unroll 1
            for (; iteration < end; ++iteration, state.advance(), x_state.advance()) {
                mbarrier_wait_parity(weight_pipeline.full(state.stage), state.parity);
                TileExpander expander(weight_stages + state.stage * kStageBytes + warp * kTileBytes, lane);
                wgmma_tile(accumulators, fragments, expander, x_pipeline,
                           smem_descriptor_low(x_stages + x_state.stage * kXBytes), x_state, previous, iteration == begin,
                           lane);
                mbarrier_arrive_warp(weight_pipeline.empty(state.stage), lane);
                previous = x_state.stage;
            }
            wgmma_wait_group<0>();
            const int first_row = (work.row_tile(tile) + warp) * kTileRows;
            const WarpOutput output(y, bias, work.m_tile(tile) * TILE_M, first_row, m, n, lane);
            reduce_and_store(accumulators, work, workspace, output, tile, begin, range, warp, lane);
        }
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();  // a CTA must not exit while another may multicast into it
}
