// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in float16 or bfloat16 on Hopper's 2:4 sparse tensor cores
// (wgmma.sp.m64n128k32).
//
// Reads: README.md, "The GPU layout". Its column order makes w 2:4: of every quad of four columns a slice of 32 rows keeps
// at most two. All rows of a slice keep the same columns, so one metadata word serves two warps. A block is eight quads,
// the k32 of one wgmma.sp; a 64-row tile that keeps nothing of a block skips it.
// Grid: persistent, at most one CTA per SM, each takes every gridDim.x-th tile of 128 tokens x 256 rows. CTA: three
// warpgroups.
// Shared memory: STAGES stages of a block of x, [2, 32 columns, 64 tokens] in 128-byte swizzle (8 KB), and its kept
// weights, [8 slices, 16 slots, 32 rows] (8 KB); STAGES metadata records of 64 bytes; STAGES full and empty mbarriers.
// Warps: warpgroup 2 produces: each of its four warps copies every fourth block by cp.async, columns of x gathered from x_t
// and slots gathered from the packed values. Warpgroups 0 and 1 consume: two 64-row tiles each. The weights are operand A,
// transposed from slots to rows on their way to registers (ldmatrix.trans), x is operand B in shared memory. The wgmma of
// one block are in flight while the next is loaded. Accumulators are float32, added in a fixed order: every run gives the
// same bits.
// Bound: no single unit. At 8:32v32 a block takes 597 cycles: shared memory is busy for 57 % of them, L2 for 36 %, tensor
// cores for 27 %, issue for 34 % (H200, ncu). 2,048 and 4,096 tokens: 0.96 to 1.18 of cuBLAS's speed at 8:32v32, 1.34 to
// 1.74 at 4:32v32 (results/h200/vector_nm-bfloat16.csv).
//
// Macros: SCALAR, LENGTH (32, 64 or 128), STAGES.

#include "arrive_warp.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 32;                          // columns of a block
constexpr int kSlots = kTileK / 2;                  // per slice and block
constexpr int kSlices = 8;                          // per row tile, 32 rows each
constexpr int kWarpgroup = 128;                     // threads
constexpr int kConsumers = 2;                       // warpgroups; four, of one 64-row tile each, have too few registers
constexpr int kProducers = 4;                       // warps
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kHalfX = kTileK * 128;                // bytes of a block of x for 64 tokens
constexpr int kXBytes = 2 * kHalfX;
constexpr int kSliceBytes = kSlots * 64;
constexpr int kMetadataBytes = 64;
constexpr int kStageBytes = kXBytes + kSlices * kSliceBytes;
constexpr int kMetadata = STAGES * kStageBytes;     // offsets in shared memory
constexpr int kFull = kMetadata + STAGES * kMetadataBytes;
constexpr int kEmpty = kFull + STAGES * 8;

// What `slots` holds instead of a slot.
constexpr Word kNoSlot = 0xffff;       // the slice keeps fewer than two columns of the quad: zeros
constexpr Word kSkippedSlot = 0xfffe;  // the 64-row tile skips the block: nothing is copied

// The stage of a block, and the parity of its phase. Blocks are counted over all tiles of a CTA.
struct PipelineState {
    int stage;
    Word parity;

    __device__ __forceinline__ explicit PipelineState(int block) : stage(block % STAGES), parity(block / STAGES & 1) {}
};

using Accumulators = float[kTileM / 2];
constexpr const SCALAR* kScalar = nullptr;  // selects overloads by type

// The A fragments and metadata of a consumer's two 64-row tiles.
struct Weights {
    Word values[2][4], metadata[2];
};

// Operand B: a block of x in a stage.
__device__ __forceinline__ Long x_descriptor(Word stage) { return smem_descriptor(stage, kHalfX, 1024, kSwizzle128); }

// The column order, see README.md.
struct Order {
    const int* block_starts;  // [row_tiles + 1]: blocks before each row tile
    const uint4* columns;     // [blocks, 2, 2]: columns 2 i + r of a block, i from 0 to 15, for r = 0, then for r = 1
    const uint4* slots;       // [blocks, 16]: the slot of each of the eight slices
    const uint4* metadata;    // [blocks, 4]: for each slice the 2:4 metadata and whether its 64-row tile needs the block
};

struct Operands {
    const SCALAR* x_t;     // [columns, pitch]
    const SCALAR* values;  // [groups, slots, LENGTH]
    int pitch, groups, slots;
};

// Returns the i-th of sixteen 16-bit numbers.
__device__ __forceinline__ Word extract_u16(const uint4 (&of)[2], int i) {
    const uint4& eight = of[i / 8];
    const Word both = i % 8 < 4 ? i % 4 < 2 ? eight.x : eight.y : i % 4 < 2 ? eight.z : eight.w;
    return i % 2 ? both >> 16 : both & 0xffff;
}

// What a producer's lane reads of a block's order: the sources of its copies.
struct BlockSources {
    uint4 columns[2], slots[2];

    __device__ __forceinline__ void load(const Order& order, int block, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            columns[i] = __ldg(order.columns + block * 4 + lane / 16 * 2 + i);
            slots[i] = __ldg(order.slots + block * kSlots + lane / 4 + 8 * i);
        }
    }
};

// Copies a producer warp's blocks of a tile: the `own`-th and every kProducers-th after it. `before`: blocks of earlier
// tiles.
__device__ __forceinline__ void produce(const Operands& from, const Order& order, int row_tile, int token_tile, Word base,
                                        int before, int own) {
    const int lane = threadIdx.x % kWarp;
    // x: a warp copies two columns at a time, 16 chunks of 16 bytes each. The chunk's index is XORed with column % 8 (128-byte
    // swizzle): here with the column's parity, at each copy with the rest.
    const int row = lane / 16, chunk = lane % 16;
    const Word to_x = chunk / 8 * kHalfX + row * 128 + ((chunk % 8 ^ row) << 4);
    const char* x = reinterpret_cast<const char*>(from.x_t + static_cast<long long>(token_tile) * kTileM + chunk * 8);
    const unsigned long long bytes = from.pitch * 2ull;
    const Word to_w = kXBytes + lane / 4 * 64 + ((lane % 4 ^ lane / 8) << 4);  // for slots lane / 4 and lane / 4 + 8
    const uint4* w[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
        const int group = min((row_tile * kTileN + slice * 32) / LENGTH, from.groups - 1);
        w[slice] = reinterpret_cast<const uint4*>(from.values + static_cast<long long>(group) * from.slots * LENGTH) +
                   slice * 32 % LENGTH / 8 + lane % 4;
    }
    const int first = order.block_starts[row_tile], count = order.block_starts[row_tile + 1] - first;
    if (own >= count) return;
    BlockSources next;
    next.load(order, first + own, lane);
#pragma unroll 1
    for (int block = own; block < count; block += kProducers) {
        // The next sources are loaded while this block is copied: they have the time of kProducers blocks to arrive.
        const BlockSources sources = next;
        next.load(order, first + min(block + kProducers, count - 1), lane);
        const PipelineState state(before + block);
        const Word stage = base + state.stage * kStageBytes, full = base + kFull + 8 * state.stage;
        mbarrier_wait_parity(full + (kEmpty - kFull), state.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kTileK / 2; ++i) {
            cp_async_16(stage + (to_x ^ i % 4 << 5) + i * 2 * 128, x + extract_u16(sources.columns, i) * bytes);
        }
#pragma unroll
        for (int i = 0; i < 2 * kSlices; ++i) {
            const Word slot = extract_u16(sources.slots, i);
            if (slot != kSkippedSlot) {
                cp_async_16(stage + to_w + i / kSlices * 512 + i % kSlices * kSliceBytes,
                            w[i % kSlices] + (slot == kNoSlot ? 0 : slot * (LENGTH / 8)), slot == kNoSlot ? 0 : 16);
            }
        }
        if (lane < 4) {
            cp_async_16(base + kMetadata + state.stage * kMetadataBytes + lane * 16,
                        order.metadata + (first + block) * 4 + lane);
        }
        cp_async_mbarrier_arrive_noinc(full);
    }
}

__device__ __forceinline__ void epilogue(const float (&d)[kTileM / 2], const SCALAR* bias, SCALAR* y, int first_row,
                                         int first_token, int m, int n) {
    const int lane = threadIdx.x % kWarp;
    float added[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + lane / 4 + 8 * i;
        added[i] = bias && row < n ? to_float(bias[row]) : 0.0f;
    }
    // Each 8 x 8 matrix is transposed; then lanes 1 apart exchange halves, so that each has four consecutive rows of a token.
    const bool odd = lane % 2;
    const int out_row = first_row + lane % 4 / 2 * 4 + 8 * odd;
    const int left = m - first_token - lane / 4;
    const int rows = n - out_row;
    SCALAR* to = y + static_cast<long long>(first_token + lane / 4) * n + out_row;
#pragma unroll
    for (int j = 0; j < kTileM / 8; ++j, to += static_cast<long long>(8) * n) {
        Word transposed[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            transposed[i] = movmatrix_trans(pack2(d[4 * j + 2 * i] + added[i], d[4 * j + 2 * i + 1] + added[i], kScalar));
        }
        const Word other = __shfl_xor_sync(0xffffffffu, odd ? transposed[0] : transposed[1], 1);
        const uint2 four = odd ? uint2{other, transposed[1]} : uint2{transposed[0], other};
        if (8 * j >= left) continue;
        if (n % 4 == 0) {
            if (rows > 0) *reinterpret_cast<uint2*>(to) = four;
            continue;
        }
        const SCALAR* values = reinterpret_cast<const SCALAR*>(&four);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < rows) to[i] = values[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) semisparse_vector_nm_gemm_sparse(
    const SCALAR* __restrict__ x_t, const SCALAR* __restrict__ values, const int* __restrict__ block_starts,
    const uint4* __restrict__ columns, const uint4* __restrict__ slots, const uint4* __restrict__ metadata,
    const SCALAR* __restrict__ bias, SCALAR* __restrict__ y,
    int m, int n, int pitch, int groups, int slots_per_group, int row_tiles
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Word base = smem_address(shared);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
    const int token_tiles = (m + kTileM - 1) / kTileM, tiles = token_tiles * row_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(base + kFull + 8 * i, kWarp);
            mbarrier_init(base + kEmpty + 8 * i, kConsumers * 4 * kArrivalsPerWarp);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    int before = 0;  // blocks of this CTA's earlier tiles
    const Order order{block_starts, columns, slots, metadata};
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<88>();
        const Operands from{x_t, values, pitch, groups, slots_per_group};
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, warp = threadIdx.x % kWarpgroup / kWarp;
            // The warps continue round-robin from tile to tile.
            const int own = (warp + kProducers - before % kProducers) % kProducers;
            produce(from, order, row_tile, tile % token_tiles, base, before, own);
            before += block_starts[row_tile + 1] - block_starts[row_tile];
        }
        cp_async_wait_all();
    } else {
        setmaxnreg_inc<208>();
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
        const int slot = lane / 16 * 8 + lane % 8;
        const int slice = warpgroup * 4 + warp / 2;  // in the first 64-row tile; in the second it is 2 higher
        const Word from_w = kXBytes + (slice * kSlots + slot) * 64 + (((warp % 2 * 2 + lane / 8 % 2) ^ (slot / 2 % 4)) << 4);
        // Even lanes hold the metadata's low half (slots 0 to 7), odd lanes the high half; twice, for rows g and g + 8.
        const Word metadata_half = lane % 2 ? 0x3232 : 0x1010;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row_tile = tile / token_tiles, token_tile = tile % token_tiles;
            Accumulators d0, d1;
#pragma unroll
            for (int i = 0; i < kTileM / 2; ++i) d0[i] = d1[i] = 0.0f;
            const int count = block_starts[row_tile + 1] - block_starts[row_tile];
            Word in_flight = 0;  // the empty mbarrier of the stage that is being multiplied
            Weights weights[2];
            auto multiply_block = [&](Weights& w, int block) {
                const PipelineState state(block);
                const Word full = base + kFull + 8 * state.stage, stage = base + state.stage * kStageBytes;
                mbarrier_wait_parity(full, state.parity);
                const uint2* record = reinterpret_cast<const uint2*>(shared + kMetadata + state.stage * kMetadataBytes) + slice;
                const uint2 record0 = record[0], record1 = record[2];
                // The shuffles tell the compiler that the branches around wgmma are uniform (else C7519).
                const bool needed0 = __shfl_sync(0xffffffffu, record0.y, 0), needed1 = __shfl_sync(0xffffffffu, record1.y, 0);
                if (needed0) ldmatrix_x4_trans(w.values[0], stage + from_w);
                if (needed1) ldmatrix_x4_trans(w.values[1], stage + from_w + 2 * kSliceBytes);
                w.metadata[0] = __byte_perm(record0.x, 0, metadata_half);
                w.metadata[1] = __byte_perm(record1.x, 0, metadata_half);
                fence_proxy_async();
                wgmma_fence();
                if (needed0) wgmma_sp_m64n128k32(d0, w.values[0], x_descriptor(stage), w.metadata[0], kScalar);
                if (needed1) wgmma_sp_m64n128k32(d1, w.values[1], x_descriptor(stage), w.metadata[1], kScalar);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (in_flight) mbarrier_arrive_warp(in_flight, lane);
                in_flight = full + (kEmpty - kFull);
            };
            // Two register sets alternate: a wgmma still reads one while the next block is loaded to the other.
#pragma unroll 1
            for (int block = 0; block + 1 < count; block += 2) {
                multiply_block(weights[0], before + block);
                multiply_block(weights[1], before + block + 1);
            }
            if (count % 2) multiply_block(weights[0], before + count - 1);
            before += count;
            wgmma_wait_group<0>();
            if (in_flight) mbarrier_arrive_warp(in_flight, lane);
            const int row = row_tile * kTileN + warpgroup * 128 + warp * 16;
            epilogue(d0, bias, y, row, token_tile * kTileM, m, n);
            epilogue(d1, bias, y, row + 64, token_tile * kTileM, m, n);
        }
    }
}
