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
#ifndef AHEAD
#define AHEAD 4
#endif
#ifndef OPEN
#define OPEN 1
#endif
constexpr int kWarp = 32;
constexpr int kTokens = 128;
constexpr int kRows = 256;
constexpr int kColumns = 32;                        // of a block
constexpr int kKept = kColumns / 2;                 // slots of a group in it
constexpr int kSets = 4;                            // of 64 rows, a warpgroup's
constexpr int kParts = 8;                           // of 32 rows, two warps'
constexpr int kGroup = 128;                         // threads of a warpgroup
constexpr int kTakers = 2;                          // warpgroups that multiply, two sets each: with four there are too few registers
constexpr int kBringers = 128;                      // threads that bring
constexpr int kThreads = kTakers * kGroup + kBringers;
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

using Sums = float[kTokens / 2];
constexpr const SCALAR* kind = nullptr;

// Of two sets.
struct Weights {
    Word values[2][4], positions[2];
};

struct Plan {
    const int* starts;       // [row_tiles + 1]: blocks before each tile of rows
    const uint2* columns;    // [blocks, 8]: of the columns those at 8 i + r, i from 0 to 3, for r
    const uint2* slots;      // [blocks, 16, 2]: for each slot that of the eight parts
    const uint4* records;    // [blocks, 4]: for each part two words, its positions and whether its set needs the block
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
    const int thread = threadIdx.x - kTakers * kGroup;
    const int row = thread / 16, chunk = thread % 16;  // of x: eight columns at a time, 16 chunks
    const Word x_place = chunk / 8 * kAtom + row * 128 + ((chunk % 8 ^ row) << 4);
    const char* x = reinterpret_cast<const char*>(from.by_column + static_cast<long long>(token_tile) * kTokens + chunk * 8);
    const int slot = thread / 4 % 16, half = thread / 64;  // of the parts four, one after the other
    const Word w_place = kXBytes + (half * 4 * kKept + slot) * 64 + ((thread % 4 ^ (slot / 2 % 4)) << 4);
    const char* w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first_row = (half * 4 + i) * 32;
        const int group = min(row_tile * (kRows / LENGTH) + first_row / LENGTH, from.groups - 1);
        w[i] = reinterpret_cast<const char*>(from.values + static_cast<long long>(group) * from.total * LENGTH +
                                             first_row % LENGTH + thread % 4 * 8);
    }
    const int first = plan.starts[row_tile], last = plan.starts[row_tile + 1];
    // Blocks are described AHEAD of their copies: with one, its loads were waited for (860 cycles a block, H200).
    uint2 columns[AHEAD], slots[AHEAD];
#if BULK
    Word needed[AHEAD];
#endif
    auto look = [&](int i, int block) {
        block = min(block, last - 1);
        columns[i] = __ldg(plan.columns + block * 8 + row);
        slots[i] = __ldg(plan.slots + (block * kKept + slot) * 2 + half);
#if BULK
        needed[i] = 0;
        for (int set = 0; set < kSets; ++set) needed[i] |= __ldg(reinterpret_cast<const Word*>(plan.records + block * 4) + set * 4 + 1) << set;
#endif
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) look(i, first + i);
    const unsigned bytes = from.pitch * 2;
#pragma unroll 1
    for (int begin = first; begin < last; begin += AHEAD) {
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int block = begin + ahead;
            if (block >= last) break;
            const Word stage = base + at.stage * kStageBytes, full = base + kBarriers + 8 * at.stage;
            barrier::wait(full + 8 * STAGES, at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < kColumns / 8; ++i) {
                copy_async(stage + x_place + i * 8 * 128,
                           x + static_cast<unsigned long long>(sixteen(columns[ahead], i)) * bytes);
            }
#if BULK
            if (thread == 0) {
                barrier::expect(full, __popc(needed[ahead]) * 2 * kPartBytes);
                const char* tiles = reinterpret_cast<const char*>(from.values) + static_cast<long long>(block) * kParts * kPartBytes;
                const int mine = CLUSTER > 1 ? static_cast<int>(block_of_cluster()) : 0;
#pragma unroll 1
                for (int i = mine * (kSets / CLUSTER); i < (mine + 1) * (kSets / CLUSTER); ++i) {
                    if (!(needed[ahead] >> i & 1)) continue;
                    const Word to = stage + kXBytes + i * 2 * kPartBytes;
                    if (CLUSTER > 1) copy_to_all(to, tiles + i * 2 * kPartBytes, 2 * kPartBytes, full, 3);
                    else copy_bulk(to, tiles + i * 2 * kPartBytes, 2 * kPartBytes, full);
                }
            }
#else
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Word found = sixteen(slots[ahead], i);
                // 65,535: there is none; 65,534: nor is it needed.
                if (found != 0xfffe) {
                    copy_async(stage + w_place + i * kPartBytes,
                               w[i] + (found == 0xffff ? 0ull : found * (LENGTH * 2ull)),
                               found == 0xffff ? 0 : 16);
                }
            }
#endif
            if (thread < 4) {
                copy_async(base + kRecords + at.stage * kRecordBytes + thread * 16, plan.records + block * 4 + thread);
            }
            arrive_after_copies(full);
            look(ahead, block + AHEAD);
            at.next();
        }
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
            barrier::init(base + kBarriers + 8 * i, kBringers + BULK);
            barrier::init(base + kBarriers + 8 * (STAGES + i), kTakers * 4 * CLUSTER);
        }
        barrier::publish();
    }
    if (CLUSTER > 1) sync_cluster();
    else __syncthreads();
    Walk at;
    const Plan plan{starts, columns, slots, records};
    if (group == kTakers) {
        give_registers<64>();
        const Operands from{by_column, values, pitch, groups, total};
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            bring(from, plan, tile / token_tiles, tile % token_tiles, base, at);
        }
        wait_for_own_copies();
    } else {
        take_registers<216>();
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
        const int slot = lane / 16 * 8 + lane % 8, part = group * 4 + warp / 2;  // of the first set; the other's is 2 further
        const Word w_place = kXBytes + (part * kKept + slot) * 64 + (((warp % 2 * 2 + lane / 8 % 2) ^ (slot / 2 % 4)) << 4);
        const Word half = lane % 2 ? 0x3232 : 0x1010;
        auto free_stage = [&](Word barrier) {
            if (CLUSTER == 1 && lane == 0) barrier::arrive(barrier);
            if (CLUSTER > 1 && lane < CLUSTER) arrive_at(barrier, lane);
        };
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, token_tile = tile % token_tiles;
            Sums first, second;
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) first[i] = second[i] = 0.0f;
            const int count = starts[row_tile + 1] - starts[row_tile];
            Word held = 0;  // the barrier of the stage that is being multiplied
            Weights w[2];
            auto take = [&](Weights& of) {
                const Word full = base + kBarriers + 8 * at.stage, stage = base + at.stage * kStageBytes;
                barrier::wait(full, at.parity);
                const uint2* record = reinterpret_cast<const uint2*>(shared + kRecords + at.stage * kRecordBytes) + part;
                const uint2 mine = record[0], other = record[2];
                const bool first_needed = __shfl_sync(0xffffffffu, mine.y, 0), second_needed = __shfl_sync(0xffffffffu, other.y, 0);
                if (first_needed) load_turned(of.values[0], stage + w_place);
                if (second_needed) load_turned(of.values[1], stage + w_place + 2 * kPartBytes);
                of.positions[0] = __byte_perm(mine.x, 0, half);
                of.positions[1] = __byte_perm(other.x, 0, half);
                begin_products();
                if (first_needed) multiply(first, of.values[0], describe(stage, kAtom, 1024), of.positions[0], kind);
                if (second_needed) multiply(second, of.values[1], describe(stage, kAtom, 1024), of.positions[1], kind);
                commit_products();
                wait_for_products<OPEN>();
                if (OPEN == 0) free_stage(full + 8 * STAGES);
                else if (held) free_stage(held);
                held = full + 8 * STAGES;
                at.next();
            };
#pragma unroll 1
            for (int block = 0; block + 1 < count; block += 2) {
                take(w[0]);
                take(w[1]);
            }
            if (count % 2) take(w[0]);
            wait_for_products<0>();
            if (OPEN && held) free_stage(held);
            const int row = row_tile * kRows + group * 128 + warp * 16;
            finish(first, bias, y, row, token_tile * kTokens, m, n);
            finish(second, bias, y, row + 64, token_tile * kTokens, m, n);
        }
    }
    if (CLUSTER > 1) sync_cluster();  // nobody leaves while the other may still write into its shared memory
}

#endif
