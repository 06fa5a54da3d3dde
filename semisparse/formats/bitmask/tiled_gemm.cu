// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and any m, on Hopper's wgmma.
//
// The weights are the operand in registers: a lane's fragment of wgmma is that of mma.m16n8k16, so each warp unpacks its own
// 16 rows as in tiled_decode.cu, and while the tensor cores take one slice of 64 columns it unpacks the next. x comes from
// shared memory in the order of the fragments' columns: tiled_columns.cu has put it so.
//
// A block computes WARPGROUPS * 64 rows for TOKENS tokens. Two warps of one more warpgroup bring the operands by bulk copies: one tiles of
// weights into WEIGHT_STAGES places, one slices of x into X_STAGES places. SPLITS blocks form a cluster and share the columns;
// each then adds what all of them found for its share of the tokens, always in the same order: every run gives the same bits.
//
// Compiled for SCALAR (half or bfloat16), KEEP (values a block), TOKENS (32, or a multiple of 64 up to 256), WARPGROUPS,
// SPLITS, WEIGHT_STAGES, X_STAGES, BLOCKS (a processor holds at once). Other GPUs than Hopper get an empty kernel, which
// tiled.py never launches.

#ifndef __CUDA_ARCH_FEAT_SM90_ALL

extern "C" __global__ void semisparse_bitmask_tiled_gemm() {}

#else

#include "scalars.cuh"
#include "hopper.cuh"

constexpr int kConsumers = WARPGROUPS * 4;                           // warps, of 16 rows each
constexpr int kThreads = (kConsumers + 4) * kWarp;                   // a warpgroup to bring operands: registers go by those
constexpr int kRegisters = 65536 / BLOCKS / kThreads / 8 * 8;         // that a thread begins with
constexpr int kFewRegisters = 32;
constexpr int kManyRegisters = (kRegisters * kThreads - kFewRegisters * 128) / (kConsumers * kWarp) / 8 * 8;
constexpr int kBlockRows = WARPGROUPS * 64;
constexpr int kPitch = kBlockRows + 4;                               // of sums, in words: lanes meet in no bank
constexpr int kSlices = 4;                                           // of 64 columns in a tile
constexpr int kSliceBytes = TOKENS * 128;
constexpr int kXBytes = X_STAGES * kSliceBytes;
constexpr int kStageBytes = kConsumers * kTileBytes;
constexpr int kRingBytes = kXBytes + WEIGHT_STAGES * kStageBytes + kOverrun;
constexpr int kSumBytes = TOKENS * kPitch * 4;                       // where the rings were
constexpr int kBarriers = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
constexpr int kChunk = TOKENS < 64 ? 32 : 64;                        // tokens of one wgmma
constexpr int kChunks = TOKENS / kChunk;

// A ring of places in shared memory: where the next turn takes place.
template <int stages>
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The barriers of a ring: a place is full, a place is free.
struct Ring {
    Word barriers;
    __device__ __forceinline__ Word full(int stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ Word free(int stage) const { return barriers + stage * 16 + 8; }
};

using Sums = float[kChunks][kChunk / 2];
using Fragments = Word[4][4];  // of the four steps of a slice

template <int slice, int step = 0>
__device__ __forceinline__ void unpack(Fragments& found, Rows& rows) {
    const uint2 a = rows.upper.take<slice * 4 + step>();
    const uint2 b = rows.lower.take<slice * 4 + step>();
    found[step][0] = a.x, found[step][1] = b.x, found[step][2] = a.y, found[step][3] = b.y;
    if constexpr (step < 3) unpack<slice, step + 1>(found, rows);
}

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& weights, Word x, bool adds) {
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            multiply_async(sums[chunk], weights[step], describe(x + chunk * kChunk * 128 + step * 32), adds || step,
                           static_cast<const SCALAR*>(nullptr));
    commit_products();
}

// One slice of a tile: unpacked while the one before is multiplied, whose place is then free.
template <int slice = 0>
__device__ __forceinline__ void take_slices(Sums& sums, Fragments (&weights)[2], Rows& rows, Turn<X_STAGES>& turn,
                                            Ring ring, Word x, bool first, int lane) {
    unpack<slice>(weights[slice % 2], rows);
    const bool adds = slice || !first;
    barrier::wait(ring.full(turn.stage), turn.parity);
    multiply(sums, weights[slice % 2], x + turn.stage * kSliceBytes, adds);
    wait_for_products<1>();
    if (adds && lane == 0) barrier::arrive(ring.free(turn.stage ? turn.stage - 1 : X_STAGES - 1));
    turn.advance();
    if constexpr (slice + 1 < kSlices) take_slices<slice + 1>(sums, weights, rows, turn, ring, x, first, lane);
}

__device__ __forceinline__ void bring_weights(Ring ring, Word place, const unsigned char* tiles, int first_row_tile,
                                              int row_tiles, int column_tiles, int first, int last) {
    Turn<WEIGHT_STAGES> turn;
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
    Turn<X_STAGES> turn;
    for (int slice = first; slice < last; ++slice, turn.advance()) {
        barrier::wait(ring.free(turn.stage), turn.parity ^ 1);
        barrier::expect(ring.full(turn.stage), kSliceBytes);
        copy_bulk(place + turn.stage * kSliceBytes, columns + static_cast<long long>(slice) * kSliceBytes, kSliceBytes,
                  ring.full(turn.stage));
    }
}

// Lane 4 * g + t of a warp holds its rows g and g + 8 of the tokens 2 t and 2 t + 1 of every 8.
__device__ __forceinline__ void keep(float* kept, const Sums& sums, int warp, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) {
            const int token = chunk * kChunk + i / 4 * 8 + lane % 4 * 2 + i % 2;
            kept[token * kPitch + warp * kRows + i / 2 % 2 * 8 + lane / 4] = sums[chunk][i];
        }
}

// Adds what the cluster's blocks found for this block's share of the tokens, eight rows a thread.
__device__ __forceinline__ void finish(Word kept, const SCALAR* bias, SCALAR* y, int m, int n, int first_row, int split) {
    constexpr int kUnits = kBlockRows / 8;
    constexpr int kShare = (TOKENS + SPLITS - 1) / SPLITS;
    const int first = split * kShare, last = min(min(first + kShare, TOKENS), m);
#pragma unroll 2
    for (int i = first * kUnits + threadIdx.x; i < last * kUnits; i += kConsumers * kWarp) {
        const int token = i / kUnits, row = i % kUnits * 8;
        const int left = n - first_row - row;
        if (left <= 0) continue;
        float sums[8] = {};
#pragma unroll
        for (int other = 0; other < SPLITS; ++other) {
            const Word place = kept + (token * kPitch + row) * 4;
            const float4 a = read_cluster4(place, other), b = read_cluster4(place + 16, other);
            sums[0] += a.x, sums[1] += a.y, sums[2] += a.z, sums[3] += a.w;
            sums[4] += b.x, sums[5] += b.y, sums[6] += b.z, sums[7] += b.w;
        }
        union {
            SCALAR values[8];
            uint4 all;
        } unit;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            store(unit.values + j, sums[j] + (bias && j < left ? to_float(bias[first_row + row + j]) : 0.0f));
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

extern "C" __global__ void __cluster_dims__(1, SPLITS, 1) __launch_bounds__(kThreads, BLOCKS) semisparse_bitmask_tiled_gemm(
    const unsigned char* __restrict__ columns,  // x as tiled_columns.cu stores it
    const unsigned char* __restrict__ tiles,    // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,            // [n] or null
    SCALAR* __restrict__ y,                     // [m, n]
    int m, int n, int row_tiles, int column_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);  // tells the compiler that it is the warp's
    const int split = blockIdx.y;
    const int first = split * column_tiles / SPLITS, last = (split + 1) * column_tiles / SPLITS;
    const Word base = shared_address(shared);
    const Word places = base + kXBytes;
    const Ring x_ring{base + kBarriers}, weight_ring{base + kBarriers + X_STAGES * 16};
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES + WEIGHT_STAGES; ++i)
            barrier::init(x_ring.full(i), 1), barrier::init(x_ring.free(i), kConsumers);
        barrier::publish();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        give_registers<kFewRegisters>();
        if (lane == 0 && warp == kConsumers) {
            bring_weights(weight_ring, places, tiles, blockIdx.x * kConsumers, row_tiles, column_tiles, first, last);
        } else if (lane == 0 && warp == kConsumers + 1) {
            wait_for_previous_kernel();
            const long long token_tile = static_cast<long long>(blockIdx.z) * column_tiles * kSlices;
            bring_x(x_ring, base, columns + token_tile * kSliceBytes, first * kSlices, last * kSlices);
        }
        __syncwarp();
        __syncthreads();
        return;
    }
    take_registers<kManyRegisters>();
    Sums sums;
    Fragments weights[2];
    Turn<X_STAGES> x_turn;
    Turn<WEIGHT_STAGES> turn;
#pragma unroll 1
    for (int column = first; column < last; ++column, turn.advance()) {
        barrier::wait(weight_ring.full(turn.stage), turn.parity);
        Rows rows(places + turn.stage * kStageBytes + warp * kTileBytes, lane);
        take_slices(sums, weights, rows, x_turn, x_ring, base, column == first, lane);
        if (lane == 0) barrier::arrive(weight_ring.free(turn.stage));
    }
    wait_for_products<0>();
    __syncthreads();  // every place has been read
    keep(reinterpret_cast<float*>(shared), sums, warp, lane);
    if (SPLITS > 1) meet_cluster<true>();
    else __syncthreads();
    const long long first_token = static_cast<long long>(blockIdx.z) * TOKENS;
    finish(base, bias, y + first_token * n, m - blockIdx.z * TOKENS, n, blockIdx.x * kBlockRows, split);
    if (SPLITS > 1) meet_cluster<false>();  // others still read this block's sums
}

#endif
