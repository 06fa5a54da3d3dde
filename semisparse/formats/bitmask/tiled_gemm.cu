// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and any m, on Hopper's wgmma.
//
// The weights are the operand in registers: a lane's fragment of wgmma is that of mma.m16n8k16, so each warp unpacks its own
// 16 rows as in tiled_decode.cu, and while the tensor cores take one step of 16 columns it unpacks the next. x comes from
// shared memory in the order of the fragments' columns: tiled_columns.cu has put it so.
//
// A block computes WARPGROUPS * 64 rows for TOKENS tokens. Two warps of one more warpgroup bring the operands by bulk copies:
// one tiles of weights into STAGES places, one the four slices of x that go with a tile into a place each. SPLITS blocks
// share the columns: each hands its sums over in memory, and when all have, each adds its share of the tokens, in the order of
// the blocks: every run gives the same bits. Blocks start in the order of their numbers and those that share are neighbours,
// so the first that wait have all whom they wait for.
//
// Compiled for SCALAR (half or bfloat16), KEEP (values a block), TOKENS (32, or a multiple of 64 up to 256), WARPGROUPS,
// SPLITS, STAGES, BLOCKS (a processor holds at once). Other GPUs than Hopper get an empty kernel, which nobody launches.

#ifndef __CUDA_ARCH_FEAT_SM90_ALL

extern "C" __global__ void semisparse_bitmask_tiled_gemm() {}

#else

#include "dependent.cuh"
#include "hopper.cuh"
#include "scalars.cuh"

constexpr int kConsumers = WARPGROUPS * 4;                           // warps, of 16 rows each
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kThreads = kConsumerThreads + 128;                     // a warpgroup to bring operands: registers go by those
constexpr int kRegisters = 65536 / BLOCKS / kThreads / 8 * 8;        // that a thread begins with
constexpr int kFewRegisters = 32;
constexpr int kManyRegisters = (kRegisters * kThreads - kFewRegisters * 128) / kConsumerThreads / 8 * 8;
constexpr int kBlockRows = WARPGROUPS * 64;
constexpr int kPitch = kBlockRows + 4;                               // of sums, in words: lanes meet in no bank
constexpr int kSlices = 4;                                           // of 64 columns in a tile
constexpr int kSliceBytes = TOKENS * 128;
constexpr int kXBytes = kSlices * kSliceBytes;
constexpr int kStageBytes = kConsumers * kTileBytes;
constexpr int kRingBytes = kXBytes + STAGES * kStageBytes + kOverrun;
constexpr int kSumBytes = TOKENS * kPitch * 4;                       // where the rings were
constexpr int kBarriers = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
constexpr int kBatch = 1;                                            // steps unpacked, then multiplied, together
constexpr int kOpen = kBatch == 1 ? 2 : 1;                           // batches being multiplied while one is unpacked
constexpr int kGroups = TOKENS / 8;                                  // of eight tokens

// Where the next turn of a ring takes place.
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The barriers of places in shared memory: one is full, one is free.
struct Ring {
    Word barriers;
    __device__ __forceinline__ Word full(int stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ Word free(int stage) const { return barriers + stage * 16 + 8; }
};

using Sums = float[TOKENS / 2];
using Fragments = Word[kBatch][4];

template <int step, int i = 0>
__device__ __forceinline__ void unpack(Fragments& found, Rows& rows) {
    const uint2 a = rows.upper.take<step + i>(), b = rows.lower.take<step + i>();
    found[i][0] = a.x, found[i][1] = b.x, found[i][2] = a.y, found[i][3] = b.y;
    if constexpr (i + 1 < kBatch) unpack<step, i + 1>(found, rows);
}

// A tile, kBatch steps at a time: they are unpacked while the products of the steps before are under way. One, two and four
// steps are equally fast.
template <int step = 0>
__device__ __forceinline__ void take_steps(Sums& sums, Fragments (&weights)[kOpen * 2], Rows& rows, Ring ring, Word x,
                                           int parity, bool first, int lane) {
    constexpr int slice = step / 4;
    Fragments& fragments = weights[step / kBatch % (kOpen * 2)];
    unpack<step>(fragments, rows);
    if (step % 4 == 0) barrier::wait(ring.full(slice), parity);
    begin_products();
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
        multiply_async(sums, fragments[i], x + slice * kSliceBytes / 16 + (step % 4 + i) * 2, step + i || !first,
                       static_cast<const SCALAR*>(nullptr));
    commit_products();
    wait_for_products<kOpen>();
    if (step % 4 == (kOpen - 1) * kBatch && (slice || !first) && lane == 0)  // the last product of the slice before is done
        barrier::arrive(ring.free((slice + kSlices - 1) % kSlices));
    if constexpr (step + kBatch < kSteps) take_steps<step + kBatch>(sums, weights, rows, ring, x, parity, first, lane);
}

__device__ __forceinline__ void bring_weights(Ring ring, Word place, const unsigned char* tiles, int first_row_tile,
                                              int row_tiles, int column_tiles, int first, int last) {
    Turn turn;
    for (int column = first; column < last; ++column, turn.advance()) {
        barrier::wait(ring.free(turn.stage), turn.parity ^ 1);
        barrier::expect(ring.full(turn.stage), kStageBytes);
#pragma unroll 1
        for (int i = 0; i < kConsumers; ++i) {  // rows past the last tile repeat it and are not stored
            const long long index = static_cast<long long>(min(first_row_tile + i, row_tiles - 1)) * column_tiles + column;
            copy_bulk(place + turn.stage * kStageBytes + i * kTileBytes, tiles + index * kTileBytes, kTileBytes,
                      ring.full(turn.stage));
        }
    }
}

__device__ __forceinline__ void bring_x(Ring ring, Word place, const unsigned char* columns, int first, int last) {
    for (int slice = first * kSlices; slice < last * kSlices; ++slice) {
        const int stage = slice % kSlices;
        barrier::wait(ring.free(stage), slice / kSlices - first & 1 ^ 1);
        barrier::expect(ring.full(stage), kSliceBytes);
        copy_bulk(place + stage * kSliceBytes, columns + static_cast<long long>(slice) * kSliceBytes, kSliceBytes,
                  ring.full(stage));
    }
}

// Lane 4 * g + t of a warp holds, of every eight tokens, 2 t and 2 t + 1: those of row g, then those of row g + 8.
__device__ __forceinline__ float4 sums_of(const Sums& sums, int group) {
    return float4{sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]};
}

__device__ __forceinline__ void keep(float* kept, float4 sums, int group, int warp, int lane) {
    float* place = kept + (group * 8 + lane % 4 * 2) * kPitch + warp * kRows + lane / 4;
    place[0] = sums.x, place[kPitch] = sums.y, place[8] = sums.z, place[kPitch + 8] = sums.w;
}

// Hands this block's sums over, and keeps those of all blocks that share the columns for its share of the groups.
__device__ __forceinline__ void exchange(float* kept, const Sums& sums, float4* handed, int* counter, int split, int first,
                                         int last, int warp, int lane) {
    float4* mine = handed + threadIdx.x;
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
        __stcg(mine + (split * kGroups + group) * kConsumerThreads, sums_of(sums, group));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        wait_for_previous_kernel();  // which sets the counters to zero
        count_in(counter);
        wait_for_blocks(counter, SPLITS);
    }
    __syncthreads();
#pragma unroll 2
    for (int group = first; group < last; ++group) {
        float4 sum{};
#pragma unroll
        for (int other = 0; other < SPLITS; ++other) {
            const float4 found = __ldcg(mine + (other * kGroups + group) * kConsumerThreads);
            sum.x += found.x, sum.y += found.y, sum.z += found.z, sum.w += found.w;
        }
        keep(kept, sum, group, warp, lane);
    }
}

// Stores the tokens of some groups, eight rows a thread.
__device__ __forceinline__ void store_tokens(const float* kept, const SCALAR* bias, SCALAR* y, int first, int last, int m,
                                             int n, int first_row) {
    constexpr int kUnits = kBlockRows / 8;
#pragma unroll 2
    for (int i = first * 8 * kUnits + threadIdx.x; i < min(last * 8, m) * kUnits; i += kConsumerThreads) {
        const int token = i / kUnits, row = i % kUnits * 8;
        const int left = n - first_row - row;
        if (left <= 0) continue;
        const float4* sums = reinterpret_cast<const float4*>(kept + token * kPitch + row);
        const float4 a = sums[0], b = sums[1];
        const float found[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        union {
            SCALAR values[8];
            uint4 all;
        } unit;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            store(unit.values + j, found[j] + (bias && j < left ? to_float(bias[first_row + row + j]) : 0.0f));
        SCALAR* place = y + static_cast<long long>(token) * n + first_row + row;
        if (n % 8 == 0) {
            *reinterpret_cast<uint4*>(place) = unit.all;
            continue;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < left) place[j] = unit.values[j];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_bitmask_tiled_gemm(
    const unsigned char* __restrict__ columns,  // x as tiled_columns.cu stores it
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    float4* handed,                             // [token tiles, row blocks, SPLITS, kGroups, kConsumerThreads]
    int* counters,                              // [token tiles, row blocks]
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);  // tells the compiler that it is the warp's
    const int split = blockIdx.x;
    const int first = split * column_tiles / SPLITS, last = (split + 1) * column_tiles / SPLITS;
    const Word base = shared_address(shared);
    const Word places = base + kXBytes;
    const Ring x_ring{base + kBarriers}, weight_ring{base + kBarriers + kSlices * 16};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlices + STAGES; ++i)
            barrier::init(x_ring.full(i), 1), barrier::init(x_ring.free(i), kConsumers);
        barrier::publish();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        give_registers<kFewRegisters>();
        if (lane == 0 && warp == kConsumers) {
            bring_weights(weight_ring, places, tiles, blockIdx.y * kConsumers, row_tiles, column_tiles, first, last);
        } else if (lane == 0 && warp == kConsumers + 1) {
            wait_for_previous_kernel();
            bring_x(x_ring, base, columns + static_cast<long long>(blockIdx.z) * column_tiles * kXBytes, first, last);
        }
        __syncwarp();
        __syncthreads();
        return;
    }
    take_registers<kManyRegisters>();
    Sums sums;
    Fragments weights[kOpen * 2];
    Turn turn;
#pragma unroll 1
    for (int column = first; column < last; ++column, turn.advance()) {
        barrier::wait(weight_ring.full(turn.stage), turn.parity);
        Rows rows(places + turn.stage * kStageBytes + warp * kTileBytes, lane);
        take_steps(sums, weights, rows, x_ring, describe(base), column - first & 1, column == first, lane);
        if (lane == 0) barrier::arrive(weight_ring.free(turn.stage));
    }
    wait_for_products<0>();
    __syncthreads();  // every place has been read
    float* kept = reinterpret_cast<float*>(shared);
    const int tile = blockIdx.z * gridDim.y + blockIdx.y;
    const int first_group = split * kGroups / SPLITS, last_group = (split + 1) * kGroups / SPLITS;
    if constexpr (SPLITS > 1) {
        exchange(kept, sums, handed + static_cast<long long>(tile) * SPLITS * kGroups * kConsumerThreads, counters + tile,
                 split, first_group, last_group, warp, lane);
    } else {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) keep(kept, sums_of(sums, group), group, warp, lane);
    }
    __syncthreads();
    const long long first_token = static_cast<long long>(blockIdx.z) * TOKENS;
    store_tokens(kept, bias, y + first_token * n, first_group, last_group, m - blockIdx.z * TOKENS, n,
                 blockIdx.y * kBlockRows);
}

#endif
