// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in 16-bit types, on Hopper's 2:4 sparse tensor cores.
//
// plan.py has put the columns of x that 256 rows keep in an order in which no group of rows keeps more than two of four
// neighbours: then the kept vectors of all of them are a 2:4 sparse matrix, although each group has columns of its own. Rows
// of a group share their columns, so one word of positions serves a warp. The order is dealt with in blocks of 32 columns; where
// 64 rows (a set) keep none of a block, nothing is multiplied for them.
//
// A block of threads computes 128 tokens of 256 rows and walks over the tiles of y. The four warps of one warpgroup bring a block
// of columns each: gathered from x by columns, and the kept vectors gathered from the packed values. Two warpgroups multiply, two
// sets each. The weights are the operand in registers, turned from slots to rows as they are loaded; x is the one in shared memory,
// 64 tokens in each 128 swizzled bytes. Products of one block are in flight while the next is loaded. Sums are float32 in a fixed
// order: every run gives the same bits.
//
// Compiled for SCALAR, LENGTH (32, 64 or 128) and STAGES.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "types.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"

constexpr int kWarp = 32;
constexpr int kTokens = 128;
constexpr int kRows = 256;
constexpr int kColumns = 32;                        // of a block
constexpr int kKept = kColumns / 2;                 // slots of a group in it
constexpr int kParts = 8;                           // of 32 rows, two warps'
constexpr int kGroup = 128;                         // threads of a warpgroup
constexpr int kTakers = 2;                          // warpgroups that multiply, two sets each: with four there are too few registers
constexpr int kBringers = 4;                        // warps that bring a block each
constexpr int kThreads = (kTakers + 1) * kGroup;
constexpr int kAtom = kColumns * 128;               // bytes of 64 tokens of a block
constexpr int kXBytes = 2 * kAtom;
constexpr int kPartBytes = kKept * 64;
constexpr int kRecordBytes = 64;
constexpr int kStageBytes = kXBytes + kParts * kPartBytes;
constexpr int kRecords = STAGES * kStageBytes;
constexpr int kBarriers = kRecords + STAGES * kRecordBytes;

// The place of a block in the ring: blocks are counted for as long as the threads live.
struct Place {
    int stage;
    Word parity;

    __device__ __forceinline__ explicit Place(int block) : stage(block % STAGES), parity(block / STAGES & 1) {}
};

using Sums = float[kTokens / 2];
constexpr const SCALAR* kind = nullptr;

// Of two sets.
struct Weights {
    Word values[2][4], positions[2];
};

struct Plan {
    const int* starts;     // [row_tiles + 1]: blocks before each tile of rows
    const uint4* columns;  // [blocks, 2, 2]: of the columns those at 2 i + r, i from 0 to 15, for r
    const uint4* slots;    // [blocks, 16]: for each slot that of the eight parts
    const uint4* records;  // [blocks, 4]: for each part two words, its positions and whether its set needs the block
};

struct Operands {
    const SCALAR* by_column;  // [columns, pitch]
    const SCALAR* values;     // [groups, total, LENGTH]
    int pitch, groups, total;
};

__device__ __forceinline__ Word sixteen(const uint4 (&of)[2], int i) {
    const uint4& eight = of[i / 8];
    const Word both = i % 8 < 4 ? i % 4 < 2 ? eight.x : eight.y : i % 4 < 2 ? eight.z : eight.w;
    return i % 2 ? both >> 16 : both & 0xffff;
}

// What a lane of a warp that brings has to know of a block.
struct Described {
    uint4 columns[2], slots[2];

    __device__ __forceinline__ void read(const Plan& plan, int block, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            columns[i] = __ldg(plan.columns + block * 4 + lane / 16 * 2 + i);
            slots[i] = __ldg(plan.slots + block * kKept + lane / 4 + 8 * i);
        }
    }
};

// Brings a tile's blocks from the `own`-th on, every kBringers-th of them: a warp's. `begin` blocks were before.
__device__ __forceinline__ void bring(const Operands& from, const Plan& plan, int row_tile, int token_tile, Word base,
                                      int begin, int own) {
    const int lane = threadIdx.x % kWarp;
    const int row = lane / 16, chunk = lane % 16;  // of x: two columns at a time, 16 chunks
    const Word x_place = chunk / 8 * kAtom + row * 128 + ((chunk % 8 ^ row) << 4);
    const char* x = reinterpret_cast<const char*>(from.by_column + static_cast<long long>(token_tile) * kTokens + chunk * 8);
    const unsigned long long bytes = from.pitch * 2ull;
    const Word w_place = kXBytes + lane / 4 * 64 + ((lane % 4 ^ lane / 8) << 4);  // of slot lane / 4; then of the eighth after it
    const uint4* w[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int group = min((row_tile * kRows + part * 32) / LENGTH, from.groups - 1);
        w[part] = reinterpret_cast<const uint4*>(from.values + static_cast<long long>(group) * from.total * LENGTH) +
                  part * 32 % LENGTH / 8 + lane % 4;
    }
    const int first = plan.starts[row_tile], count = plan.starts[row_tile + 1] - first;
    if (own >= count) return;
    Described next;
    next.read(plan, first + own, lane);
#pragma unroll 1
    for (int block = own; block < count; block += kBringers) {
        // The next is described while this one is brought: its loads have the time of kBringers blocks.
        const Described here = next;
        next.read(plan, first + min(block + kBringers, count - 1), lane);
        const Place at(begin + block);
        const Word stage = base + at.stage * kStageBytes, full = base + kBarriers + 8 * at.stage;
        mbarrier_wait_parity(full + 8 * STAGES, at.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
            cp_async_16(stage + (x_place ^ i % 4 << 5) + i * 2 * 128, x + sixteen(here.columns, i) * bytes);
        }
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
            // 65,535: there is none; 65,534: nor is it needed.
            const Word slot = sixteen(here.slots, i);
            if (slot != 0xfffe) {
                cp_async_16(stage + w_place + i / kParts * 512 + i % kParts * kPartBytes,
                           w[i % kParts] + (slot == 0xffff ? 0 : slot * (LENGTH / 8)), slot == 0xffff ? 0 : 16);
            }
        }
        if (lane < 4) {
            cp_async_16(base + kRecords + at.stage * kRecordBytes + lane * 16,
                       plan.records + (first + block) * 4 + lane);
        }
        cp_async_mbarrier_arrive_noinc(full);
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
    // Each 8 x 8 is turned, then lanes 1 apart exchange halves, so that each has four consecutive rows of a token.
    const bool odd = lane % 2;
    const int out_row = first_row + lane % 4 / 2 * 4 + 8 * odd;
    const int left = m - first_token - lane / 4;
    const int rows = n - out_row;
    SCALAR* place = y + static_cast<long long>(first_token + lane / 4) * n + out_row;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j, place += static_cast<long long>(8) * n) {
        Word of[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            of[i] = movmatrix_trans(pack2(sums[4 * j + 2 * i] + added[i], sums[4 * j + 2 * i + 1] + added[i], kind));
        }
        const Word other = __shfl_xor_sync(0xffffffffu, odd ? of[0] : of[1], 1);
        const uint2 four = odd ? uint2{other, of[1]} : uint2{of[0], other};
        if (8 * j >= left) continue;
        if (n % 4 == 0) {
            if (rows > 0) *reinterpret_cast<uint2*>(place) = four;
            continue;
        }
        const SCALAR* values = reinterpret_cast<const SCALAR*>(&four);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < rows) place[i] = values[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) semisparse_vector_nm_fours(
    const SCALAR* __restrict__ by_column, const SCALAR* __restrict__ values, const int* __restrict__ starts,
    const uint4* __restrict__ columns, const uint4* __restrict__ slots, const uint4* __restrict__ records,
    const SCALAR* __restrict__ bias, SCALAR* __restrict__ y, int m, int n, int pitch, int groups, int total, int row_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Word base = smem_address(shared);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
    const int token_tiles = (m + kTokens - 1) / kTokens, tiles = token_tiles * row_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(base + kBarriers + 8 * i, kWarp);
            mbarrier_init(base + kBarriers + 8 * (STAGES + i), kTakers * 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    int begin = 0;  // blocks before the tile's
    const Plan plan{starts, columns, slots, records};
    if (group == kTakers) {
        setmaxnreg_dec<88>();
        const Operands from{by_column, values, pitch, groups, total};
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, warp = threadIdx.x % kGroup / kWarp;
            // Warps take turns from tile to tile as well.
            bring(from, plan, row_tile, tile % token_tiles, base, begin, (warp + kBringers - begin % kBringers) % kBringers);
            begin += starts[row_tile + 1] - starts[row_tile];
        }
        cp_async_wait_all();
    } else {
        setmaxnreg_inc<208>();
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroup / kWarp;
        const int slot = lane / 16 * 8 + lane % 8, part = group * 4 + warp / 2;  // of the first set; the other's is 2 further
        const Word w_place = kXBytes + (part * kKept + slot) * 64 + (((warp % 2 * 2 + lane / 8 % 2) ^ (slot / 2 % 4)) << 4);
        const Word half = lane % 2 ? 0x3232 : 0x1010;
        auto free_stage = [&](Word barrier) {
            if (lane == 0) mbarrier_arrive(barrier);
        };
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, token_tile = tile % token_tiles;
            Sums first, second;
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) first[i] = second[i] = 0.0f;
            const int count = starts[row_tile + 1] - starts[row_tile];
            Word held = 0;  // the barrier of the stage that is being multiplied
            Weights w[2];
            auto take = [&](Weights& of, int block) {
                const Place at(block);
                const Word full = base + kBarriers + 8 * at.stage, stage = base + at.stage * kStageBytes;
                mbarrier_wait_parity(full, at.parity);
                const uint2* record = reinterpret_cast<const uint2*>(shared + kRecords + at.stage * kRecordBytes) + part;
                const uint2 mine = record[0], other = record[2];
                const bool first_needed = __shfl_sync(0xffffffffu, mine.y, 0), second_needed = __shfl_sync(0xffffffffu, other.y, 0);
                if (first_needed) ldmatrix_x4_trans(of.values[0], stage + w_place);
                if (second_needed) ldmatrix_x4_trans(of.values[1], stage + w_place + 2 * kPartBytes);
                of.positions[0] = __byte_perm(mine.x, 0, half);
                of.positions[1] = __byte_perm(other.x, 0, half);
                fence_proxy_async();
                wgmma_fence();
                if (first_needed) wgmma_sp_m64n128k32(first, of.values[0], smem_descriptor(stage, kAtom, 1024, kSwizzle128), of.positions[0], kind);
                if (second_needed) wgmma_sp_m64n128k32(second, of.values[1], smem_descriptor(stage, kAtom, 1024, kSwizzle128), of.positions[1], kind);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (held) free_stage(held);
                held = full + 8 * STAGES;
            };
#pragma unroll 1
            for (int block = 0; block + 1 < count; block += 2) {
                take(w[0], begin + block);
                take(w[1], begin + block + 1);
            }
            if (count % 2) take(w[0], begin + count - 1);
            begin += count;
            wgmma_wait_group<0>();
            if (held) free_stage(held);
            const int row = row_tile * kRows + group * 128 + warp * 16;
            finish(first, bias, y, row, token_tile * kTokens, m, n);
            finish(second, bias, y, row + 64, token_tile * kTokens, m, n);
        }
    }
}

