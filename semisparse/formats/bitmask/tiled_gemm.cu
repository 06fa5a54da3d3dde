// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and any m, on Hopper's wgmma.
//
// The weights are the operand in registers: a lane's fragment of wgmma is that of mma.m16n8k16, so each warp unpacks its own
// 16 rows as in tiled_decode.cu, and while the tensor cores take one step of 16 columns it unpacks the next. x comes from
// shared memory in the order of the fragments' columns: tiled_columns.cu has put it so.
//
// A tile of y is TOKENS tokens by CLUSTER * WARPGROUPS * 64 rows: CLUSTER blocks have some of the rows each, bring their share
// of x and send it to one another (2 to 4 % faster). How the work is dealt out and summed is tiled_sums.cuh's. Two warps of one
// more warpgroup bring the operands by bulk copies: one tiles of weights into STAGES places, one x in slices of 64 columns, the
// four of a tile in each of X_STAGES places.
//
// Compiled for SCALAR (half or bfloat16), KEEP (values a block), TOKENS (32, or a multiple of 64 up to 256), WARPGROUPS,
// CLUSTER, SPLITS, STAGES, X_STAGES, BLOCKS (a processor holds at once). Other GPUs than Hopper get an empty kernel, which
// nobody launches.

#ifndef __CUDA_ARCH_FEAT_SM90_ALL

extern "C" __global__ void semisparse_bitmask_tiled_gemm() {}

#else

#include "ptx/griddepcontrol.cuh"
#include "hopper.cuh"
#include "types.cuh"
#include "tiled_sums.cuh"

constexpr int kThreads = kConsumerThreads + 128;                     // a warpgroup to bring operands: registers go by those
constexpr int kRegisters = 65536 / BLOCKS / kThreads / 8 * 8;        // that a thread begins with
constexpr int kFewRegisters = 32;
constexpr int kManyRegisters = (kRegisters * kThreads - kFewRegisters * 128) / kConsumerThreads / 8 * 8;
constexpr int kSlices = 4;                                           // of 64 columns in a tile
constexpr int kSliceBytes = TOKENS * 128;
constexpr int kXBytes = kSlices * kSliceBytes;
constexpr int kStageBytes = kConsumers * kTileBytes;
constexpr int kBarriers = X_STAGES * kXBytes + STAGES * kStageBytes + kOverrun;
constexpr int kOpen = 2;                                             // steps being multiplied while one is unpacked

using Fragments = Word[2 * kOpen][4];

__device__ __forceinline__ void free_slice(Word barrier, int lane) {
    if constexpr (CLUSTER > 1) {
        if (lane < CLUSTER) mbarrier_arrive_cluster(barrier, lane);
    } else {
        if (lane == 0) mbarrier_arrive(barrier);
    }
}

// A tile, step by step: while one is multiplied the next is unpacked. `before` is where x of the tile before lay, whose last
// slice is still being read at first; negative if there was none.
template <int step = 0>
__device__ __forceinline__ void take_steps(Sums& sums, Fragments& weights, Rows& rows, Ring ring, Word x, Turn<X_STAGES> turn,
                                           int before, bool begins, int lane) {
    constexpr int slice = step / 4;
    Word(&fragments)[4] = weights[step % (2 * kOpen)];
    const uint2 a = rows.upper.take<step>(), b = rows.lower.take<step>();
    fragments[0] = a.x, fragments[1] = b.x, fragments[2] = a.y, fragments[3] = b.y;
    if (step % 4 == 0) mbarrier_wait_parity(ring.full(turn.place * kSlices + slice), turn.parity);
    wgmma_fence();
    wgmma_m64k16(sums, fragments, x + slice * kSliceBytes / 16 + step % 4 * 2, step || !begins,
                   static_cast<const SCALAR*>(nullptr));
    wgmma_commit_group();
    wgmma_wait_group<kOpen>();
    if constexpr (step == kOpen - 1) {  // the last product of the slice before is done
        if (before >= 0) free_slice(ring.free(before * kSlices + kSlices - 1), lane);
    } else if constexpr (step % 4 == kOpen - 1) {
        free_slice(ring.free(turn.place * kSlices + slice - 1), lane);
    }
    if constexpr (step + 1 < kSteps) take_steps<step + 1>(sums, weights, rows, ring, x, turn, before, begins, lane);
}

__device__ __forceinline__ void bring_weights(Ring ring, Word place, const unsigned char* tiles, Work work, int row_tiles,
                                              int first, int last) {
    Turn<STAGES> turn;
    for (int unit = first; unit < last; ++unit, turn.advance()) {
        const int first_row_tile = work.row_tile(work.tile(unit)), column = work.column(unit);
        mbarrier_wait_parity(ring.free(turn.place), turn.parity ^ 1);
        mbarrier_arrive_expect_tx(ring.full(turn.place), kStageBytes);
#pragma unroll 1
        for (int i = 0; i < kConsumers; ++i) {  // rows past the last tile repeat it and are not stored
            const long long index =
                static_cast<long long>(min(first_row_tile + i, row_tiles - 1)) * work.column_tiles + column;
            cp_async_bulk(place + turn.place * kStageBytes + i * kTileBytes, tiles + index * kTileBytes, kTileBytes,
                      ring.full(turn.place));
        }
    }
}

__device__ __forceinline__ void bring_x(Ring ring, Word place, const unsigned char* columns, Work work, int first, int last) {
    constexpr int kShare = kSliceBytes / CLUSTER;
    const int mine = CLUSTER > 1 ? static_cast<int>(cluster_ctarank()) * kShare : 0;
    Turn<X_STAGES> turn;
    for (int unit = first; unit < last; ++unit, turn.advance()) {
        const long long tile = static_cast<long long>(work.token_tile(work.tile(unit))) * work.column_tiles + work.column(unit);
        const unsigned char* from = columns + tile * kXBytes + mine;
#pragma unroll 1
        for (int slice = 0; slice < kSlices; ++slice) {
            const int at = turn.place * kSlices + slice;
            mbarrier_wait_parity(ring.free(at), turn.parity ^ 1);
            mbarrier_arrive_expect_tx(ring.full(at), kSliceBytes);
            if constexpr (CLUSTER > 1) {
                cp_async_bulk_multicast(place + at * kSliceBytes + mine, from + slice * kSliceBytes, kShare, ring.full(at),
                            (1 << CLUSTER) - 1);
            } else {
                cp_async_bulk(place + at * kSliceBytes, from + slice * kSliceBytes, kShare, ring.full(at));
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, BLOCKS) semisparse_bitmask_tiled_gemm(
    const unsigned char* __restrict__ columns,  // x as tiled_columns.cu stores it
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* handed,                             // [blocks, kConsumers, kGroups, kWarp]
    int* counters,                              // [blocks, kConsumers], zeros
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);  // tells the compiler that it is the warp's
    const Work work = work_of(m, row_tiles, column_tiles);
    const int share = blockIdx.x / CLUSTER;
    const int first = work.first(share), last = work.first(share + 1);
    const Word base = smem_address(shared);
    const Word places = base + X_STAGES * kXBytes;
    const Ring x_ring{base + kBarriers}, weight_ring{base + kBarriers + X_STAGES * kSlices * 16};
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES * kSlices; ++i)
            mbarrier_init(x_ring.full(i), 1), mbarrier_init(x_ring.free(i), CLUSTER * kConsumers);
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(weight_ring.full(i), 1), mbarrier_init(weight_ring.free(i), kConsumers);
        fence_mbarrier_init();
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();
    else __syncthreads();

    if (warp >= kConsumers) {
        setmaxnreg_dec<kFewRegisters>();
        if (lane == 0 && warp == kConsumers) {
            bring_weights(weight_ring, places, tiles, work, row_tiles, first, last);
        } else if (lane == 0 && warp == kConsumers + 1) {
            griddepcontrol_wait();
            bring_x(x_ring, base, columns, work, first, last);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<kManyRegisters>();
        const Handing handing{handed, counters};
        Sums sums;
        Fragments weights;
        Turn<STAGES> turn;
        Turn<X_STAGES> x_turn;
        int before = -1;
#pragma unroll 1
        for (int unit = first; unit < last;) {
            const int tile = work.tile(unit), begin = unit, end = min(last, work.end(tile));
#pragma unroll 1
            for (; unit < end; ++unit, turn.advance(), x_turn.advance()) {
                mbarrier_wait_parity(weight_ring.full(turn.place), turn.parity);
                Rows rows(places + turn.place * kStageBytes + warp * kTileBytes, lane);
                take_steps(sums, weights, rows, x_ring, smem_descriptor_low(base + x_turn.place * kXBytes), x_turn, before,
                           unit == begin, lane);
                if (lane == 0) mbarrier_arrive(weight_ring.free(turn.place));
                before = x_turn.place;
            }
            wgmma_wait_group<0>();
            const int first_row = (work.row_tile(tile) + warp) * kRows;
            const Output output(y, bias, work.token_tile(tile) * TOKENS, first_row, m, n, lane);
            finish(sums, work, handing, output, tile, begin, end, share, warp, lane);
        }
    }
    if constexpr (CLUSTER > 1) barrier_cluster_sync();  // nobody leaves while another may still write into its shared memory
}

#endif
