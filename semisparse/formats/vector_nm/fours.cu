// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in 16-bit types, on Hopper's 2:4 sparse tensor cores.
//
// fours.py has put the columns of x that ROWS rows keep in an order in which no group of rows keeps more than two of four
// neighbours: then the kept vectors of all of them are a 2:4 sparse matrix, although each group has columns of its own. Rows
// of a group share their columns, so one word of positions serves a warp. The order is dealt with in blocks of 32 columns; where
// 64 rows keep none of a block, nothing is multiplied for them.
//
// A block of threads computes TOKENS x ROWS. One warpgroup brings the columns of a block, gathered from x transposed, and its
// kept vectors, gathered from the packed values; four warpgroups of 64 rows multiply. The weights are the operand in registers,
// turned from slots to rows as they are loaded; x is the one in shared memory, 64 tokens in each 128 swizzled bytes.
//
// Compiled for SCALAR, LENGTH (a multiple of 32), STAGES. Other GPUs than Hopper get an empty kernel, which nobody launches.

#ifndef __CUDA_ARCH_FEAT_SM90_ALL

extern "C" __global__ void semisparse_vector_nm_fours() {}

#else

#include "clusters.cuh"
#include "copies.cuh"
#include "fours.cuh"
#include "matrices.cuh"
#include "scalars.cuh"
#include "warpgroups.cuh"

#ifndef BULK
#define BULK 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef SKIP_X
#define SKIP_X 0
#endif
#ifndef SKIP_W
#define SKIP_W 0
#endif
#ifndef SWAP
#define SWAP 0
#endif
#ifndef META
#define META 0
#endif
#ifndef FENCE
#define FENCE 0
#endif
constexpr int kWarp = 32;
constexpr int kTokens = 128;
constexpr int kRows = 256;
constexpr int kColumns = 32;                        // of a block
constexpr int kKept = kColumns / 2;                 // slots of a group in it
constexpr int kSets = 4;                            // of 64 rows, a warpgroup's
constexpr int kParts = 8;                           // of 32 rows, two warps'
constexpr int kGroup = 128;                         // threads of a warpgroup
constexpr int kThreads = (kSets + 1) * kGroup;
constexpr int kAtom = kColumns * 128;               // bytes of 64 tokens of a block
constexpr int kXBytes = 2 * kAtom;
constexpr int kPartBytes = kKept * 64;
constexpr int kRecordBytes = 64;
constexpr int kStageBytes = kXBytes + kParts * kPartBytes;
constexpr int kRecords = STAGES * kStageBytes;
constexpr int kBarriers = kRecords + STAGES * kRecordBytes;

struct Walk {  // over the stages, for as long as the block lives
    int stage = 0;
    Word parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Plan {
    const int* starts;       // [row_tiles + 1]: blocks before each tile of rows
    const uint2* columns;    // [blocks, 8]: the columns at 8 i + r, i from 0 to 3, for r
    const uint2* slots;      // [blocks, 16, 2]: of the parts 2 i + p, i from 0 to 3, for slot and p; 65,535 for none
    const uint4* records;    // [blocks, 4]: positions of each part, eight words; then a bit for each set that has any
};

struct Operands {
    const SCALAR* by_column;  // [columns, pitch]
    const SCALAR* values;     // [groups, total, LENGTH]
    int pitch, groups, total;
};

__device__ __forceinline__ Word sixteen(uint2 four, int i) {
    const Word both = i < 2 ? four.x : four.y;
    return i % 2 ? both >> 16 : both & 0xffff;
}

// Brings a tile's blocks.
__device__ __forceinline__ void bring(const Operands& from, const Plan& plan, int row_tile, int token_tile, Word base,
                                      Walk& at) {
    const int thread = threadIdx.x % kGroup;
    const int row = thread / 16, chunk = thread % 16;                       // of x: eight columns at a time, 16 chunks
    const Word x_place = chunk / 8 * kAtom + row * 128 + ((chunk % 8 ^ row) << 4);
    const char* x = reinterpret_cast<const char*>(from.by_column + static_cast<long long>(token_tile) * kTokens + chunk * 8);
    const int slot = thread / 4 % 16, part = thread / 64;
    const Word w_place = kXBytes + (part * kKept + slot) * 64 + ((thread % 4 ^ (slot / 2 % 4)) << 4);
    const char* w[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
        const int first_row = (2 * i + part) * 32;
        const int group = min(row_tile * (kRows / LENGTH) + first_row / LENGTH, from.groups - 1);
        w[i] = reinterpret_cast<const char*>(from.values + static_cast<long long>(group) * from.total * LENGTH +
                                             first_row % LENGTH + thread % 4 * 8);
    }
    const int first = plan.starts[row_tile], last = plan.starts[row_tile + 1];
    uint2 columns = __ldg(plan.columns + first * 8 + row), slots = __ldg(plan.slots + first * 32 + slot * 2 + part);
    Word active = __ldg(reinterpret_cast<const Word*>(plan.records + first * 4) + 8);
    const unsigned bytes = from.pitch * 2;
    for (int block = first; block < last; ++block, at.next()) {
        const int next = min(block + 1, last - 1);
        const uint2 next_columns = __ldg(plan.columns + next * 8 + row);
        const uint2 next_slots = __ldg(plan.slots + next * 32 + slot * 2 + part);
        const Word next_active = __ldg(reinterpret_cast<const Word*>(plan.records + next * 4) + 8);
        const Word stage = base + at.stage * kStageBytes;
        barrier::wait(base + kBarriers + 8 * (STAGES + at.stage), at.parity ^ 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (SKIP_X) break;
            copy_async(stage + x_place + i * 8 * 128, x + static_cast<unsigned long long>(sixteen(columns, i)) * bytes);
        }
#if BULK
        if (thread == 0) {
            barrier::expect(base + kBarriers + 8 * at.stage, __popc(active) * 2 * kPartBytes);
            const char* tiles = reinterpret_cast<const char*>(from.values) + static_cast<long long>(block) * kParts * kPartBytes;
            const int mine = CLUSTER > 1 ? static_cast<int>(block_of_cluster()) : 0;
#pragma unroll 1
            for (int i = mine * (kSets / CLUSTER); i < (mine + 1) * (kSets / CLUSTER); ++i) {
                if (!(active >> i & 1)) continue;
                const Word to = stage + kXBytes + i * 2 * kPartBytes;
                if (CLUSTER > 1) copy_to_all(to, tiles + i * 2 * kPartBytes, 2 * kPartBytes, base + kBarriers + 8 * at.stage, 3);
                else copy_bulk(to, tiles + i * 2 * kPartBytes, 2 * kPartBytes, base + kBarriers + 8 * at.stage);
            }
        }
#else
#pragma unroll
        for (int i = 0; i < kSets; ++i) {
            if (SKIP_W) break;
            const Word found = sixteen(slots, i);
            if (active >> i & 1) {
                copy_async(stage + w_place + i * 2 * kPartBytes, w[i] + (found == 0xffff ? 0ull : found * (LENGTH * 2ull)),
                           found == 0xffff ? 0 : 16);
            }
        }
#endif
        if (thread < 3) copy_async(base + kRecords + at.stage * kRecordBytes + thread * 16, plan.records + block * 4 + thread);
        arrive_after_copies(base + kBarriers + 8 * at.stage);
        columns = next_columns, slots = next_slots, active = next_active;
    }
}

__device__ __forceinline__ void finish(const float (&sums)[kTokens / 2], const SCALAR* bias, SCALAR* y, int first_row,
                                       int first_token, int m, int n) {
    const int lane = threadIdx.x % kWarp;
    float added[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + lane / 4 + 8 * i;
        added[i] = bias && row < n ? to_float(bias[row]) : 0.0f;
    }
    const int out_row = first_row + lane % 4 * 2;
    const int left = m - first_token - lane / 4;
    const int rows = n - out_row;
    SCALAR* place = y + static_cast<long long>(first_token + lane / 4) * n + out_row;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j, place += static_cast<long long>(8) * n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Word both = transpose(pack(sums[4 * j + 2 * i] + added[i], sums[4 * j + 2 * i + 1] + added[i],
                                             static_cast<const SCALAR*>(nullptr)));
            if (8 * j >= left) continue;
            if (n % 2 == 0) {
                if (8 * i < rows) *reinterpret_cast<Word*>(place + 8 * i) = both;
            } else {
                if (8 * i < rows) place[8 * i] = reinterpret_cast<const SCALAR*>(&both)[0];
                if (8 * i + 1 < rows) place[8 * i + 1] = reinterpret_cast<const SCALAR*>(&both)[1];
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1) semisparse_vector_nm_fours(
    const SCALAR* __restrict__ by_column, const SCALAR* __restrict__ values, const int* __restrict__ starts,
    const uint2* __restrict__ columns, const uint2* __restrict__ slots, const uint4* __restrict__ records,
    const SCALAR* __restrict__ bias, SCALAR* __restrict__ y, int m, int n, int pitch, int groups, int total, int row_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Word base = shared_address(shared);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
    const int token_tiles = ((m + kTokens - 1) / kTokens + CLUSTER - 1) / CLUSTER * CLUSTER, tiles = token_tiles * row_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier::init(base + kBarriers + 8 * i, kGroup + BULK);
            barrier::init(base + kBarriers + 8 * (STAGES + i), kSets * 4 * CLUSTER);
        }
        barrier::publish();
    }
    if (CLUSTER > 1) sync_cluster();
    else __syncthreads();
    Walk at;
    const Plan plan{starts, columns, slots, records};
    if (group == kSets) {
        give_registers<40>();
        const Operands from{by_column, values, pitch, groups, total};
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            bring(from, plan, tile / token_tiles, tile % token_tiles, base, at);
        }
        wait_for_own_copies();
    } else {
        take_registers<104>();
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
        const int slot = lane / 16 * 8 + lane % 8, part = group * 2 + warp / 2;
        const Word w_place = kXBytes + (part * kKept + slot) * 64 + (((warp % 2 * 2 + lane / 8 % 2) ^ (slot / 2 % 4)) << 4);
        const Word half = META ? 0x3210 : lane % 2 ? 0x3232 : 0x1010;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, token_tile = tile % token_tiles;
            float sums[kTokens / 2];
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
            const int count = starts[row_tile + 1] - starts[row_tile];
#pragma unroll 1
            for (int block = 0; block < count; ++block, at.next()) {
                barrier::wait(base + kBarriers + 8 * at.stage, at.parity);
                const Word* record = reinterpret_cast<const Word*>(shared + kRecords + at.stage * kRecordBytes);
                if (record[kParts] >> group & 1) {
                    const Word stage = base + at.stage * kStageBytes;
                    const Word positions = __byte_perm(record[part], 0, half);
                    Word w[4];
                    load_turned(w, stage + w_place);
#if FENCE
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
                    begin_products();
                    multiply(sums, w, describe(stage, SWAP ? 1024 : kAtom, SWAP ? kAtom : 1024), positions, static_cast<const SCALAR*>(nullptr));
                    commit_products();
                    wait_for_products<0>();
                    __syncwarp();
                }
                if (CLUSTER == 1 && lane == 0) barrier::arrive(base + kBarriers + 8 * (STAGES + at.stage));
                if (CLUSTER > 1 && lane < CLUSTER) arrive_at(base + kBarriers + 8 * (STAGES + at.stage), lane);
            }
            finish(sums, bias, y, row_tile * kRows + group * 64 + warp * 16, token_tile * kTokens, m, n);
        }
    }
    if (CLUSTER > 1) sync_cluster();  // nobody leaves while the other may still write into its shared memory
}

#endif
