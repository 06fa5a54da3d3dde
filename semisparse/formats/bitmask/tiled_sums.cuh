// How the products on wgmma deal out their work and put it together: shares of the units, sums handed from one to another,
// and how a warp stores its 16 rows of a tile of y.
//
// A tile of y is TOKENS tokens by CLUSTER * WARPGROUPS * 64 rows; a unit of work is a tile of y by 256 columns. Clusters of
// blocks take equal shares of all units, one after another; a tile that several share is summed in memory in the order of the
// shares, so every run gives the same bits:
//   SPLITS = 0: whoever has a tile's first columns, as the last of its share, adds what the others had as the first of theirs.
//   SPLITS > 0: so many shares are one tile, and each adds a part of the tokens.
// Each warp hands over and takes over its own rows. Blocks start in the order of their numbers and those that share are
// neighbours, so the first that wait have all whom they wait for.

#pragma once

#include "ptx/griddepcontrol.cuh"
#include "hopper.cuh"
#include "types.cuh"

constexpr int kConsumers = WARPGROUPS * 4;                           // warps that multiply, of 16 rows each
constexpr int kConsumerThreads = kConsumers * kWarp;
constexpr int kGroups = TOKENS / 8;                                  // of eight tokens
constexpr int kSharers = SPLITS > 0 ? SPLITS : 1;                    // shares that are one tile

// Where the next turn of a ring of so many places takes place.
template <int places>
struct Turn {
    int place = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++place == places) place = 0, parity ^= 1;
    }
};

// The barriers of places in shared memory: one is full, one is free.
struct Ring {
    Word barriers;
    __device__ __forceinline__ Word full(int place) const { return barriers + place * 16; }
    __device__ __forceinline__ Word free(int place) const { return barriers + place * 16 + 8; }
};

// The units of a share, and what a unit is.
struct Work {
    int column_tiles, token_tiles, units, shares;
    __device__ __forceinline__ int first(int share) const { return static_cast<long long>(share) * units / shares; }
    __device__ __forceinline__ int tile(int unit) const { return unit / column_tiles; }
    __device__ __forceinline__ int column(int unit) const { return unit % column_tiles; }
    __device__ __forceinline__ int end(int tile) const { return (tile + 1) * column_tiles; }
    __device__ __forceinline__ int token_tile(int tile) const { return tile % token_tiles; }
    // The block's first warp's tile of rows.
    __device__ __forceinline__ int row_tile(int tile) const {
        return (tile / token_tiles * CLUSTER + blockIdx.x % CLUSTER) * kConsumers;
    }
};

__device__ __forceinline__ Work work_of(int m, int row_tiles, int column_tiles) {
    const int token_tiles = (m + TOKENS - 1) / TOKENS;
    const int row_groups = (row_tiles + CLUSTER * kConsumers - 1) / (CLUSTER * kConsumers);
    return {column_tiles, token_tiles, row_groups * token_tiles * column_tiles, static_cast<int>(gridDim.x) / CLUSTER};
}

using Sums = float[TOKENS / 2];

// Lane 4 * g + t of a warp holds, of every eight tokens, 2 t and 2 t + 1: those of row g, then those of row g + 8.
__device__ __forceinline__ float4 sums_of(const Sums& sums, int group) {
    return float4{sums[4 * group], sums[4 * group + 1], sums[4 * group + 2], sums[4 * group + 3]};
}

__device__ __forceinline__ void add(Sums& sums, int group, float4 more) {
    sums[4 * group] += more.x, sums[4 * group + 1] += more.y, sums[4 * group + 2] += more.z, sums[4 * group + 3] += more.w;
}

// What warps hand over: the sums of each, [block, warp, group, lane], and how many have arrived.
struct Handing {
    float4* sums;
    int* counters;
    __device__ __forceinline__ float4* of(int share, int warp, int lane) const {
        const long long block = static_cast<long long>(share) * CLUSTER + blockIdx.x % CLUSTER;
        return sums + (block * kConsumers + warp) * kGroups * kWarp + lane;
    }
    // Of a warp's place in the block, for a share or a tile.
    __device__ __forceinline__ int* counter(int number, int warp) const {
        return counters + (number * CLUSTER + blockIdx.x % CLUSTER) * kConsumers + warp;
    }
};

__device__ __forceinline__ void hand_over(const Sums& sums, float4* place, int* counter, int lane) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) __stcg(place + group * kWarp, sums_of(sums, group));
    __syncwarp();
    if (lane == 0) {
        griddepcontrol_wait();  // which sets the counters to zero
        red_release_gpu_increment(counter);
    }
}

__device__ __forceinline__ void wait_for_warps(const int* counter, int count, int lane) {
    if (lane == 0) {
        griddepcontrol_wait();
        wait_for_blocks(counter, count);
    }
    __syncwarp();
}

// Where a warp stores its 16 rows of a tile of y.
struct Output {
    SCALAR* y;             // of the first token and row
    int tokens, rows, n;   // that there are, from these on
    float upper, lower;    // bias of the rows g and g + 8

    __device__ __forceinline__ Output(SCALAR* y, const SCALAR* bias, int first_token, int first_row, int m, int n, int lane)
        : y(y + static_cast<long long>(first_token) * n + first_row), tokens(m - first_token), rows(n - first_row), n(n),
          upper(bias && lane / 4 < rows ? to_float(bias[first_row + lane / 4]) : 0.0f),
          lower(bias && lane / 4 + 8 < rows ? to_float(bias[first_row + lane / 4 + 8]) : 0.0f) {}

    // Eight tokens; a lane stores two neighbouring rows of one of them.
    __device__ __forceinline__ void store(float4 sums, int group, int lane) const {
        const int token = group * 8 + lane / 4, row = lane % 4 * 2;
        const Word found[2] = {movmatrix_trans(pack<SCALAR>(sums.x + upper, sums.y + upper)),
                               movmatrix_trans(pack<SCALAR>(sums.z + lower, sums.w + lower))};
        if (token >= tokens) return;
        SCALAR* place = y + static_cast<long long>(token) * n;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + 8 * half;
            if (n % 2 == 0) {
                if (at < rows) *reinterpret_cast<Word*>(place + at) = found[half];
                continue;
            }
            const SCALAR* values = reinterpret_cast<const SCALAR*>(found + half);
            if (at < rows) place[at] = values[0];
            if (at + 1 < rows) place[at + 1] = values[1];
        }
    }
};

// The sums of a share for a tile of y, of which it had the units from `first` to `last`.
__device__ __forceinline__ void finish(Sums& sums, const Work& work, const Handing& handing, const Output& output, int tile,
                                       int first, int last, int share, int warp, int lane) {
    if constexpr (SPLITS > 1) {
        int* counter = handing.counter(tile, warp);
        hand_over(sums, handing.of(share, warp, lane), counter, lane);
        wait_for_warps(counter, kSharers, lane);
        const int split = share % kSharers;
#pragma unroll 2
        for (int group = split * kGroups / kSharers; group < (split + 1) * kGroups / kSharers; ++group) {
            float4 sum{};
#pragma unroll
            for (int other = 0; other < kSharers; ++other) {
                const float4 found = __ldcg(handing.of(share - split + other, warp, lane) + group * kWarp);
                sum.x += found.x, sum.y += found.y, sum.z += found.z, sum.w += found.w;
            }
            output.store(sum, group, lane);
        }
        return;
    }
    if (SPLITS == 0 && work.column(first)) {
        hand_over(sums, handing.of(share, warp, lane), handing.counter(share, warp), lane);
        return;
    }
    if constexpr (SPLITS == 0) {
        for (int other = share + 1; other < work.shares && work.first(other) < work.end(tile); ++other) {
            wait_for_warps(handing.counter(other, warp), 1, lane);
            const float4* found = handing.of(other, warp, lane);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) add(sums, group, __ldcg(found + group * kWarp));
        }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) output.store(sums_of(sums, group), group, lane);
}
