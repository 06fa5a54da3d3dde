// 2:4 sparse GEMM on Hopper's tensor cores, with scales, bias and cast in its epilogue:
//   y[m, n] = (sum_k x[m, k] * w[n, k]) * token_scales[m] * row_scales[n] + bias[n]
// w is the lifted weight and x the lifted activations, both in the layout `tiles` (README.md, "Layouts on a GPU"). A K tile is
// 128 bytes of K': of every token of x, and of every row of w (64 bytes of values after 2:4 compression).
//
// Grid:    persistent; (SMs / CLUSTER) clusters of CLUSTER CTAs, or as many as there are work units. A unit is a tile of y, or
//          one of the `splits` parts of K' of a tile of the last wave. Unit i goes to cluster i modulo the number of clusters.
// CTA:     WARPGROUPS consumer warpgroups and a producer warpgroup. A CTA's tile of y is CTA_M tokens by 64 * WARPGROUPS rows
//          of w; the CTAs of a cluster have the same tokens and consecutive rows.
// Shared:  dynamic: x[STAGES][CTA_M * 128 B], w[STAGES][WARPGROUPS][5,120 B in 8 bits, 4,608 B in 16], an EpilogueBuffer per
//          consumer warpgroup (2 * 16 tokens * 64 rows of y, CTA_M scales). Static: an mbarrier `full` and `empty` per stage.
// Producer: one thread copies each stage: the CTA's own tiles of w, and 1 / CLUSTER of the tokens, multicast to the cluster.
// Consumer: warpgroup g multiplies 64 rows with all tokens, two wgmma.sp per stage, and writes them to y through shared
//          memory. It starts STAGGER K tiles behind warpgroup g - 1, so that one's epilogue overlaps the other's wgmma.
// Split-K: each split writes its accumulators to `partials`; the last to finish (`arrivals`) adds them in the order of the
//          splits, so that every run gives the same bits. No CTA waits for another.
//
// Bound:   shared memory bandwidth, 128 bytes per cycle. A wgmma.sp of 64 rows, 256 tokens and 64 bytes of K' takes 128 cycles
//          and reads 18 KB, 144 bytes per cycle; filling the stages adds 10.5 KB. So 56 % of the tensor cores' peak is the
//          maximum. Reached: 49 % at 37888 x 3584, 4,096 tokens, int8 (H200); large GEMMs also run at the power limit
//          (README.md).
//
// Macros: INT8, FP8, BF16 or FP16 (of w and x); OUT (of y and bias); CTA_M, WARPGROUPS, CLUSTER, STAGES, STAGGER.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "arrive_warp.cuh"
#include "ptx/bar.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

#if defined(INT8)
using Element = Int8;
using Accumulator = int;
#elif defined(FP8)
using Element = Fp8;
using Accumulator = float;
#elif defined(BF16)
using Element = __nv_bfloat16;
using Accumulator = float;
#else
using Element = __half;
using Accumulator = float;
#endif

constexpr int kRows = 64;                   // of w per warpgroup: M of wgmma
constexpr int kWarpgroup = 128;             // threads
constexpr int kAccumulators = CTA_M / 2;    // per thread
#if defined(INT8) || defined(FP8)
constexpr int kSelectors = 1;               // wgmmas that share a word of metadata
#else
constexpr int kSelectors = 2;
#endif
constexpr int kValueBytes = kRows * 64;                         // values of a tile of w
constexpr int kWeightBytes = kValueBytes + 1024 / kSelectors;   // values and metadata
constexpr int kTokenBytes = 128;                                // per token and stage
constexpr int kActivationBytes = CTA_M * kTokenBytes;           // x per stage
constexpr int kMulticastBytes = kActivationBytes / CLUSTER;
constexpr int kStageBytes = kActivationBytes + WARPGROUPS * kWeightBytes;
constexpr int kBandTiles = 4096 / CTA_M;    // maximum tiles along M per band of tile_at: a band of x stays in L2
constexpr int kStepTokens = 16;             // tokens that a warpgroup's epilogue writes at a time

#if WARPGROUPS == 3
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;
#else
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
#endif

// Named barriers: a consumer warpgroup's own, and one by which it starts the next warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) { bar_sync<kWarpgroup>(warpgroup + 1); }
__device__ __forceinline__ void start_warpgroup(int warpgroup) { bar_arrive<2 * kWarpgroup>(warpgroup + 8); }
__device__ __forceinline__ void wait_for_start(int warpgroup) { bar_sync<2 * kWarpgroup>(warpgroup + 8); }

struct Tile {
    int n, m;  // index along N of the cluster's tile of y, and along M
};

// The index-th tile of y: M fastest inside a band of tokens, then N, then bands.
__device__ __forceinline__ Tile tile_at(int index, int n_tiles, int m_tiles) {
    const int bands = (m_tiles + kBandTiles - 1) / kBandTiles, band_tiles = (m_tiles + bands - 1) / bands;
    const int band = index / (band_tiles * n_tiles), within = index % (band_tiles * n_tiles);
    const int width = min(band_tiles, m_tiles - band * band_tiles);
    return {within / width, band * band_tiles + within % width};
}

// The next stage, and the parity of its mbarriers' phase.
struct PipelineState {
    int stage = 0;
    Word parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The grid's units of work. Tiles of y have the order of tile_at. The first `whole_tiles` tiles are one unit each; every later
// tile is `splits` units, each a part of K'.
struct Schedule {
    int k_tiles, row_tiles;  // of w
    int splits;
    Word rank;               // of this CTA in its cluster
    int m_tiles, n_tiles, whole_tiles, units;

    __device__ __forceinline__ Schedule(int m, int k_tiles, int row_tiles, int whole_tiles, int splits)
        : k_tiles(k_tiles), row_tiles(row_tiles), splits(splits), rank(cluster_ctarank()), m_tiles((m + CTA_M - 1) / CTA_M),
          n_tiles((row_tiles + WARPGROUPS * CLUSTER - 1) / (WARPGROUPS * CLUSTER)), whole_tiles(whole_tiles),
          units(whole_tiles + (m_tiles * n_tiles - whole_tiles) * splits) {}

    __device__ __forceinline__ bool is_split(int unit) const { return unit >= whole_tiles; }
    __device__ __forceinline__ int split_tile(int unit) const { return (unit - whole_tiles) / splits; }
    __device__ __forceinline__ int split(int unit) const { return (unit - whole_tiles) % splits; }

    __device__ __forceinline__ Tile tile(int unit) const {
        return tile_at(is_split(unit) ? whole_tiles + split_tile(unit) : unit, n_tiles, m_tiles);
    }

    // The unit's K tiles: begin to end - 1.
    __device__ __forceinline__ int begin(int unit) const { return is_split(unit) ? k_tiles * split(unit) / splits : 0; }
    __device__ __forceinline__ int end(int unit) const {
        return is_split(unit) ? k_tiles * (split(unit) + 1) / splits : k_tiles;
    }

    // The first of the CTA's tiles of 64 rows. If rows do not fill the last CTAs, these overlap the ones before.
    __device__ __forceinline__ int first_row_tile(const Tile& tile) const {
        return min((tile.n * CLUSTER + static_cast<int>(rank)) * WARPGROUPS, row_tiles - WARPGROUPS);
    }
};

// A thread's scales and bias, loaded before the main loop, which hides their latency.
struct Scales {
    float tokens[(CTA_M + kWarpgroup - 1) / kWarpgroup], rows[2], bias[2];

    __device__ __forceinline__ Scales(const float* token_scales, const float* row_scales, const OUT* from_bias, int first_row,
                                      int first_token, int m, int n) {
        const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
        for (int i = 0; i * kWarpgroup < CTA_M; ++i) {
            const int token = first_token + thread + i * kWarpgroup;
            tokens[i] = token_scales && token < m ? token_scales[token] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
            rows[i] = row_scales && row < n ? row_scales[row] : 1.0f;
            bias[i] = from_bias && row < n ? static_cast<float>(from_bias[row]) : 0.0f;
        }
    }
};

// A warpgroup's staging buffer: two steps of y, so that one is read while the other is written, and its tokens' scales.
struct alignas(128) EpilogueBuffer {
    unsigned char steps[2][kStepTokens * kRows * sizeof(OUT)];
    float token_scales[CTA_M];
};

// Scales a warpgroup's accumulators and writes them to y. A thread's accumulators are neighbours along M, but y is contiguous
// along N: stmatrix.trans transposes them, and y is stored from shared memory in lines of 128 bytes.
__device__ __forceinline__ void epilogue(const Accumulator (&accumulators)[kAccumulators], const Scales& scales,
                                         EpilogueBuffer& buffer, int warpgroup, OUT* y, int first_row, int first_token, int m,
                                         int n) {
    const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32, warp = thread / 32;
#pragma unroll
    for (int i = 0; i * kWarpgroup < CTA_M; ++i)
        if (thread + i * kWarpgroup < CTA_M) buffer.token_scales[thread + i * kWarpgroup] = scales.tokens[i];
    warpgroup_sync(warpgroup);
    // The 16-byte unit c (8 rows) of token t is at position c ^ (t % 8) of the token's 128 bytes: no bank conflicts.
    const int put_token = lane / 16 * 8 + lane % 8, put = put_token * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    const int token = thread / 8, row = first_row + thread % 8 * 8, get = token * 128 + (thread % 8 ^ token % 8) * 16;
    OUT* to = y + static_cast<Long>(first_token + token) * n + row;
#pragma unroll
    for (int step = 0; step < CTA_M / kStepTokens; ++step, to += static_cast<Long>(kStepTokens) * n) {
        Word words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = 2 * step + half;
            const float2 by_token = *reinterpret_cast<const float2*>(buffer.token_scales + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                words[2 * half + i] =
                    pack2(static_cast<float>(accumulators[4 * j + 2 * i]) * by_token.x * scales.rows[i] + scales.bias[i],
                          static_cast<float>(accumulators[4 * j + 2 * i + 1]) * by_token.y * scales.rows[i] + scales.bias[i],
                          static_cast<const OUT*>(nullptr));
        }
        unsigned char* staged = buffer.steps[step % 2];
        stmatrix_x4_trans(smem_address(staged + put), words);
        warpgroup_sync(warpgroup);
        const uint4 values = *reinterpret_cast<const uint4*>(staged + get);
        const bool inside = first_token + step * kStepTokens + token < m;
        if (n % 8 == 0) {
            if (inside && row < n) *reinterpret_cast<uint4*>(to) = values;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (inside && row + i < n) to[i] = reinterpret_cast<const OUT*>(&values)[i];
        }
    }
}

// The producer: fills the stages for all units of the CTA, each when all consumers of the cluster have released it.
__device__ __forceinline__ void produce(const Schedule& schedule, const unsigned char* w, const unsigned char* x, Word stages,
                                        Word full, Word empty, PipelineState& pipeline) {
    const Word weights = stages + STAGES * kActivationBytes;
    const Long w_stride = static_cast<Long>(schedule.row_tiles) * kWeightBytes;
    const Long x_stride = static_cast<Long>(schedule.m_tiles) * kActivationBytes;
    for (int unit = blockIdx.x / CLUSTER; unit < schedule.units; unit += gridDim.x / CLUSTER) {
        const Tile tile = schedule.tile(unit);
        const int begin = schedule.begin(unit), end = schedule.end(unit);
        const unsigned char* w_from = w + begin * w_stride + static_cast<Long>(schedule.first_row_tile(tile)) * kWeightBytes;
        const unsigned char* x_from =
            x + begin * x_stride + static_cast<Long>(tile.m) * kActivationBytes + schedule.rank * kMulticastBytes;
#pragma unroll 1  // the waiting loop is in the asm, so the compiler takes this one for an innermost loop and unrolls it by 4
        for (int k_tile = begin; k_tile < end; ++k_tile) {
            mbarrier_wait_parity(empty + 8 * pipeline.stage, pipeline.parity ^ 1);
            const Word mbarrier = full + 8 * pipeline.stage;
            mbarrier_arrive_expect_tx(mbarrier, kStageBytes);
            cp_async_bulk(weights + pipeline.stage * WARPGROUPS * kWeightBytes, w_from, WARPGROUPS * kWeightBytes, mbarrier);
            const Word to = stages + pipeline.stage * kActivationBytes + schedule.rank * kMulticastBytes;
            if (CLUSTER == 1) {
                cp_async_bulk(to, x_from, kMulticastBytes, mbarrier);
            } else {
                cp_async_bulk_multicast(to, x_from, kMulticastBytes, mbarrier, (1 << CLUSTER) - 1);
            }
            w_from += w_stride;
            x_from += x_stride;
            pipeline.advance();
        }
    }
}

// Stores a warpgroup's accumulators of one split to `partials` [splits, ...]. Returns true for the last split of the tile to
// arrive, with the sum of all in `accumulators`. `arrivals` is 0 before the first.
__device__ __forceinline__ bool reduce_splits(Accumulator (&accumulators)[kAccumulators], Accumulator* partials, int* arrivals,
                                              int split, int splits, int warpgroup, int* is_last) {
    constexpr int kPartial = kAccumulators * kWarpgroup;
    const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) partials[split * kPartial + i * kWarpgroup + thread] = accumulators[i];
    warpgroup_sync(warpgroup);
    if (thread == 0) *is_last = atom_acq_rel_gpu_increment(arrivals) == splits - 1;
    warpgroup_sync(warpgroup);
    if (!*is_last) return false;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators[i] = __ldcg(partials + i * kWarpgroup + thread);
    for (int other = 1; other < splits; ++other)
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i)
            accumulators[i] += __ldcg(partials + other * kPartial + i * kWarpgroup + thread);
    return true;
}

// w: uint8 [k_tiles, row_tiles, kWeightBytes]; x: uint8 [k_tiles, M rounded up to CTA_M, 128]; token_scales [m], row_scales [n]
// and bias [n] may be null; y [m, n]; partials: [split tiles * CLUSTER * WARPGROUPS, splits, 64 * CTA_M]; arrivals: [split
// tiles * CLUSTER * WARPGROUPS], 0 at launch. Both are unused without splits.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPGROUPS + 1) * kWarpgroup, 1)
    semisparse_slide24_gemm(const unsigned char* w, const unsigned char* x, const float* token_scales,
                            const float* row_scales, const OUT* bias, OUT* y, Accumulator* partials, int* arrivals, int m,
                            int n, int k_tiles, int row_tiles, int whole_tiles, int splits) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) Long full_mbarriers[STAGES], empty_mbarriers[STAGES];
    __shared__ int is_last[WARPGROUPS];
    const Word stages = smem_address(shared), full = smem_address(full_mbarriers), empty = smem_address(empty_mbarriers);
    const Schedule schedule(m, k_tiles, row_tiles, whole_tiles, splits);
    const int warpgroup = threadIdx.x / kWarpgroup;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, WARPGROUPS * 4 * CLUSTER * kArrivalsPerWarp);
        }
        fence_mbarrier_init();
    }
    barrier_cluster_sync();

    PipelineState pipeline;
    if (warpgroup == WARPGROUPS) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == WARPGROUPS * kWarpgroup) produce(schedule, w, x, stages, full, empty, pipeline);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
        EpilogueBuffer& buffer = reinterpret_cast<EpilogueBuffer*>(shared + STAGES * kStageBytes)[warpgroup];
        if (warpgroup > 0) wait_for_start(warpgroup);
        Accumulator accumulators[kAccumulators];
        for (int unit = blockIdx.x / CLUSTER; unit < schedule.units; unit += gridDim.x / CLUSTER) {
            const Tile tile = schedule.tile(unit);
            const int first_row = (schedule.first_row_tile(tile) + warpgroup) * kRows, first_token = tile.m * CTA_M;
            const Scales scales(token_scales, row_scales, bias, first_row, first_token, m, n);
            const int begin = schedule.begin(unit), end = schedule.end(unit);
#pragma unroll 1  // as in `produce`
            for (int k_tile = begin; k_tile < end; ++k_tile) {
                mbarrier_wait_parity(full + 8 * pipeline.stage, pipeline.parity);
                const int offset = STAGES * kActivationBytes + (pipeline.stage * WARPGROUPS + warpgroup) * kWeightBytes;
                const Word* metadata = reinterpret_cast<const Word*>(shared + offset + kValueBytes) + thread;
                const Word first = metadata[0], second = kSelectors == 1 ? metadata[kWarpgroup] : first;
                const Long a = smem_descriptor(stages + offset, 1024, 128, kNoSwizzle);
                const Long b = smem_descriptor(stages + pipeline.stage * kActivationBytes, 16, 1024, kSwizzle128);
                __syncwarp();
                wgmma_fence();
                wgmma_sp_m64<0>(accumulators, a, b, first, k_tile != begin, static_cast<const Element*>(nullptr));
                wgmma_sp_m64<kSelectors - 1>(accumulators, a + (2048 >> 4), b + (64 >> 4), second, 1,
                                             static_cast<const Element*>(nullptr));
                wgmma_commit_group();
                // wgmma.sp reads its metadata register while it runs, and the assembler loads the next stage's into the same
                // one: so no group stays in flight. The other warpgroups keep the tensor cores busy meanwhile.
                wgmma_wait_group<0>();
                __syncwarp();  // every lane has read its metadata
                if constexpr (CLUSTER > 1) {
                    mbarrier_arrive_warp_cluster<CLUSTER>(empty + 8 * pipeline.stage, lane);
                } else {
                    mbarrier_arrive_warp(empty + 8 * pipeline.stage, lane);
                }
                pipeline.advance();
                if (warpgroup + 1 < WARPGROUPS && unit == blockIdx.x / CLUSTER && k_tile == min(begin + STAGGER, end) - 1)
                    start_warpgroup(warpgroup + 1);
            }
            if (schedule.splits > 1 && schedule.is_split(unit)) {
                const int number =
                    (schedule.split_tile(unit) * CLUSTER + static_cast<int>(schedule.rank)) * WARPGROUPS + warpgroup;
                Accumulator* own = partials + static_cast<Long>(number) * schedule.splits * (kAccumulators * kWarpgroup);
                if (!reduce_splits(accumulators, own, arrivals + number, schedule.split(unit), schedule.splits, warpgroup,
                                   is_last + warpgroup))
                    continue;
            }
            epilogue(accumulators, scales, buffer, warpgroup, y, first_row, first_token, m, n);
        }
    }
    barrier_cluster_sync();  // no CTA ends while others may still multicast into its shared memory or arrive on its mbarriers
}
