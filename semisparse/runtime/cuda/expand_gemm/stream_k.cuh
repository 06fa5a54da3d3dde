// How gemm.cuh divides its iterations among clusters of CTAs, and adds accumulators across CTAs.
//
// An output tile is TILE_M tokens by CLUSTER * WARPGROUPS * 64 rows of w; an iteration is an output tile by 256 columns of K.
// Each cluster computes a contiguous range of all iterations; the lengths of ranges differ by one at most:
//   SPLIT_K = 0  Stream-K: ranges end anywhere. The cluster with an output tile's first iteration adds the partial accumulators
//                that the others stored for it (fix-up).
//   SPLIT_K > 0  split-K: an output tile is SPLIT_K ranges; every CTA adds up the partial accumulators of its share of the
//                tokens, and stores those of the others' shares: in global memory or, with SPLIT_IN_CLUSTER, in the shared memory
//                of the range that has the share. The ranges of an output tile are one cluster then.
// Partials are added in the order of the ranges, so every run returns the same bits. Each warp exchanges its own 16 rows.
//
// Warps wait for partials of other CTAs. With Stream-K, and with the split-K schedules of `choose` (runtime/gemm_schedule.py), the
// grid has at most CTAS_PER_SM CTAs per SM if warps wait: all are resident as soon as other kernels have left the GPU. With a
// larger grid, or beside another kernel that waits in the same way (such as this one in another stream), CTAs have to start in the
// order of blockIdx.x, which CUDA does not promise: the CTAs of an output tile are consecutive, so only those of the last tile
// begun can then wait for CTAs that have not started.

#pragma once

#include "expand_gemm/epilogue.cuh"
#include "expand_gemm/tile_shape.cuh"
#include "ptx/cluster.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/st_async.cuh"
#include "rows.cuh"

#ifndef SPLIT_IN_CLUSTER
#define SPLIT_IN_CLUSTER 0
#endif

static_assert(!SPLIT_IN_CLUSTER || (SPLIT_K > 1 && CLUSTER == 1), "the cluster's CTAs are the ranges of an output tile");
static_assert(!EXPERTS || SPLIT_K == 0, "the ranges of EXPERTS end anywhere");
constexpr int kRangesPerTile = SPLIT_K > 0 ? SPLIT_K : 1;
constexpr int kLoadGroups = kRangesPerTile <= 4 ? 4 : 2;  // token groups whose partials are loaded together

// With EXPERTS (rows.cuh): the tokens of an output tile are a job, up to TILE_M pairs of one expert. Output tiles are numbered
// job by job. experts/route.cu writes the jobs, and has ended when the preceding kernel, permute_pairs.cu, begins: they may be read
// before griddepcontrol.wait.
struct Jobs {
    const int* count;    // [1]
    const int* experts;  // [count], the expert of each job
    const int* pairs;    // [count, TILE_M], -1 where a job has fewer
};

struct WorkRanges {
    int column_tiles, m_tiles, iterations, ranges;
    const int* job_experts;     // with EXPERTS
    int row_groups, row_tiles;  // output tiles and weight tiles along N; with EXPERTS, of one expert
    __device__ __forceinline__ int first(int range) const {
        return static_cast<long long>(EXPERTS ? min(range, ranges) : range) * iterations / ranges;
    }
    __device__ __forceinline__ int tile(int iteration) const { return iteration / column_tiles; }
    __device__ __forceinline__ int column(int iteration) const { return iteration % column_tiles; }
    __device__ __forceinline__ int end(int tile) const { return (tile + 1) * column_tiles; }
    __device__ __forceinline__ int m_tile(int tile) const { return EXPERTS ? tile / row_groups : tile % m_tiles; }
    // The row tile of the CTA's first warp, counted over the weight or over an expert.
    __device__ __forceinline__ int row_tile(int tile) const {
        return ((EXPERTS ? tile % row_groups : tile / m_tiles) * CLUSTER + blockIdx.x % CLUSTER) * kConsumerWarps;
    }
    // The row tile that a consumer warp expands, counted over the weight or, with EXPERTS, over the stack of experts. Warps past
    // the last row tile expand it again; nothing of theirs is stored to y.
    __device__ __forceinline__ int weight_row(int tile, int warp) const {
        return (EXPERTS ? job_experts[m_tile(tile)] * row_tiles : 0) + min(row_tile(tile) + warp, row_tiles - 1);
    }
};

__device__ __forceinline__ WorkRanges make_ranges(int m, int row_tiles, int column_tiles, const Jobs& jobs) {
    const int m_tiles = EXPERTS ? *jobs.count : (m + TILE_M - 1) / TILE_M;
    const int row_groups = (row_tiles + CLUSTER * kConsumerWarps - 1) / (CLUSTER * kConsumerWarps);
    const int iterations = row_groups * m_tiles * column_tiles;
    // An empty range would store no partials, and the one before it would wait for them. With EXPERTS the host does not know the
    // number of jobs: there may be more clusters than iterations, and the last clusters have no range.
    const int ranges = static_cast<int>(gridDim.x) / CLUSTER;
    return {column_tiles, m_tiles, iterations, EXPERTS ? max(min(ranges, iterations), 1) : ranges,
            jobs.experts, row_groups, row_tiles};
}

// A consumer warp's weight tile in an iteration. advance() needs integer divisions only at the end of an output tile.
struct TileCursor {
    WorkRanges work;
    int iteration, column, weight_row;
    int warp;

    __device__ __forceinline__ TileCursor(const WorkRanges& work, int iteration, int warp)
        : work(work), iteration(iteration), column(work.column(iteration)), warp(warp) {
        find_weight_row();
    }
    __device__ __forceinline__ void advance() {
        ++iteration;
        if (++column < work.column_tiles) return;
        column = 0;
        find_weight_row();
    }
    __device__ __forceinline__ void find_weight_row() {
        if (!EXPERTS || iteration < work.iterations) weight_row = work.weight_row(work.tile(iteration), warp);
    }
};

// Partial accumulators in global memory, and counts of the warps that have stored theirs. The preceding kernel, permute_x.cu or
// permute_pairs.cu, zeroes the counters.
struct Workspace {
    float4* partials;  // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters;     // [CTAs, kConsumerWarps]

    __device__ __forceinline__ float4* partial(int range, int warp, int lane) const {
        const long long cta = static_cast<long long>(range) * CLUSTER + blockIdx.x % CLUSTER;
        return partials + (cta * kConsumerWarps + warp) * kTokenGroups * kWarpSize + lane;
    }
    // Returns a warp's counter; `number` is that of the range (Stream-K) or of the output tile (split-K).
    __device__ __forceinline__ int* counter(int number, int warp) const {
        return counters + (number * CLUSTER + blockIdx.x % CLUSTER) * kConsumerWarps + warp;
    }
};

// Counts the warp, once its lanes' stores are visible.
__device__ __forceinline__ void signal_partials(int* counter, int lane) {
    __syncwarp();
    if (lane == 0) {
        griddepcontrol_wait();  // the preceding kernel zeroes the counters
        red_release_gpu_increment(counter);
    }
}

__device__ __forceinline__ void store_partial(const Accumulators& accumulators, float4* to, int* counter, int lane) {
#pragma unroll
    for (int group = 0; group < kTokenGroups; ++group) __stcg(to + group * kWarpSize, token_group(accumulators, group));
    signal_partials(counter, lane);
}

// Waits until `count` warps have stored their partials.
__device__ __forceinline__ void wait_partials(const int* counter, int count, int lane) {
    if (lane == 0) {
        griddepcontrol_wait();
        int stored;
        do stored = ld_acquire_gpu(counter);
        while (stored < count);
    }
    __syncwarp();
}

// Split-K: a warp keeps the accumulators of its range's share of the tokens, stores the others, and adds the other ranges'
// partials. Registers need static indices, so the range's number in the output tile must be a template argument: `part` counts up
// to it.
template <int part = 0>
__device__ __forceinline__ void exchange(const Accumulators& accumulators, const Workspace& workspace, const WarpOutput& output,
                                         int tile, int range, int warp, int lane) {
    if (range % kRangesPerTile != part) {
        if constexpr (part + 1 < kRangesPerTile)
            exchange<part + 1>(accumulators, workspace, output, tile, range, warp, lane);
        return;
    }
    constexpr int begin = part * kTokenGroups / kRangesPerTile, end = (part + 1) * kTokenGroups / kRangesPerTile;
    float4* own = workspace.partial(range, warp, lane);
#pragma unroll
    for (int group = 0; group < kTokenGroups; ++group)
        if (group < begin || group >= end) __stcg(own + group * kWarpSize, token_group(accumulators, group));
    int* counter = workspace.counter(tile, warp);
    signal_partials(counter, lane);
    wait_partials(counter, kRangesPerTile, lane);
#pragma unroll
    for (int first = begin; first < end; first += kLoadGroups) {
        float4 partials[kLoadGroups][kRangesPerTile];
#pragma unroll
        for (int i = 0; i < kLoadGroups; ++i) {
            if (first + i >= end) break;
#pragma unroll
            for (int other = 0; other < kRangesPerTile; ++other)
                partials[i][other] = other == part ? token_group(accumulators, first + i)
                                                   : __ldcg(workspace.partial(range - part + other, warp, lane) +
                                                            (first + i) * kWarpSize);
        }
#pragma unroll
        for (int i = 0; i < kLoadGroups; ++i) {
            if (first + i >= end) break;
            float4 sum = partials[i][0];
#pragma unroll
            for (int other = 1; other < kRangesPerTile; ++other) {
                const float4 more = partials[i][other];
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            output.store(sum, first + i, lane);
        }
    }
}

// Where a CTA receives the partials of its share with SPLIT_IN_CLUSTER: [ranges, kConsumerWarps, kShareGroups, kWarpSize] of 16
// bytes each, and an mbarrier per warp, on which the other ranges' partials complete.
constexpr int kShareGroups = (kTokenGroups + kRangesPerTile - 1) / kRangesPerTile;
constexpr int kReceivedBytes = SPLIT_IN_CLUSTER ? kRangesPerTile * kConsumerWarps * kShareGroups * kWarpSize * 16 : 0;
struct Received {
    Word partials, mbarriers;

    __device__ __forceinline__ Word partial(int part, int warp, int lane) const {
        return partials + ((part * kConsumerWarps + warp) * kShareGroups * kWarpSize + lane) * 16;
    }
    __device__ __forceinline__ Word mbarrier(int warp) const { return mbarriers + warp * 8; }
    // By a lane of `warp`, after the CTA's first barrier (racecheck reports an arrival before it) and before the cluster's, behind which
    // other CTAs store here.
    __device__ __forceinline__ void expect(int warp) const {
        const int part = cluster_ctarank();
        const int groups = (part + 1) * kTokenGroups / kRangesPerTile - part * kTokenGroups / kRangesPerTile;
        mbarrier_arrive_expect_tx(mbarrier(warp), (kRangesPerTile - 1) * groups * kWarpSize * 16);
    }
};

// Split-K in a cluster: like exchange(). The partials lie where x was, so no CTA stores any before all have multiplied.
__device__ __forceinline__ void exchange_in_cluster(const Accumulators& accumulators, const Received& received,
                                                    const WarpOutput& output, int warp, int lane) {
    const int own = cluster_ctarank();
    const Word from = received.partial(own, warp, lane);
    barrier_cluster_sync();
#pragma unroll
    for (int group = 0; group < kTokenGroups; ++group) {
        const int part = ((group + 1) * kRangesPerTile - 1) / kTokenGroups;  // whose share the group is in
        const Word to = from + (group - part * kTokenGroups / kRangesPerTile) * kWarpSize * 16;
        const float4 partial = token_group(accumulators, group);
        if (part == own) {
            st_shared_v4(to, uint4{__float_as_uint(partial.x), __float_as_uint(partial.y), __float_as_uint(partial.z),
                                   __float_as_uint(partial.w)});
        } else {
            st_async_v4(to, partial, received.mbarrier(warp), part);
        }
    }
    mbarrier_wait_parity(received.mbarrier(warp), 0);
    const int begin = own * kTokenGroups / kRangesPerTile, end = (own + 1) * kTokenGroups / kRangesPerTile;
#pragma unroll
    for (int i = 0; i < kShareGroups; ++i) {
        if (begin + i >= end) break;
        float4 sum;
#pragma unroll
        for (int part = 0; part < kRangesPerTile; ++part) {
            Word words[4];
            ld_shared_ordered(words, received.partial(part, warp, lane) + i * kWarpSize * 16);
            const float4 more{__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                              __uint_as_float(words[3])};
            if (part == 0) sum = more;
            else sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        output.store(sum, begin + i, lane);
    }
}

// Ends a range's part of an output tile; `first` is the range's first iteration in that tile. Stores y: the tile, or with split-K the range's share of
// its tokens. With Stream-K, a range without the tile's first iteration stores partial accumulators instead.
__device__ __forceinline__ void reduce_and_store(Accumulators& accumulators, const WorkRanges& work, const Workspace& workspace,
                                                 const Received& received, const WarpOutput& output, int tile, int first,
                                                 int range, int warp, int lane) {
    if constexpr (SPLIT_IN_CLUSTER) {
        exchange_in_cluster(accumulators, received, output, warp, lane);
        return;
    }
    if constexpr (SPLIT_K > 1) {
        exchange(accumulators, workspace, output, tile, range, warp, lane);
        return;
    }
    if (SPLIT_K == 0 && work.column(first)) {
        store_partial(accumulators, workspace.partial(range, warp, lane), workspace.counter(range, warp), lane);
        return;
    }
    if constexpr (SPLIT_K == 0) {
        for (int other = range + 1; other < work.ranges && work.first(other) < work.end(tile); ++other) {
            wait_partials(workspace.counter(other, warp), 1, lane);
            const float4* partial = workspace.partial(other, warp, lane);
#pragma unroll
            for (int group = 0; group < kTokenGroups; ++group) add(accumulators, group, __ldcg(partial + group * kWarpSize));
        }
    }
#pragma unroll
    for (int group = 0; group < kTokenGroups; ++group) output.store(token_group(accumulators, group), group, lane);
}
