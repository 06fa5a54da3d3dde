// y[m, n] = x[m, k] @ w[n, k].T + bias[n] in float16 or bfloat16 for any m, straight from kept vectors, with Hopper's wgmma:
// expand_gemm/gemm.cuh (grid, CTA, shared memory). Producer warps copy the tiles by cp.async and make the tiles' masks.
//
// A slot of a tile is 16 rows of a kept vector: 32 bytes. ldmatrix.trans loads fragments from slots, so expanding takes no
// stores: each lane gives the address of one column's slot, or of zeros if the column is not kept. A mask has a bit for each
// of 32 columns, set if it is kept; a column's slot is the number of set bits below. Four producer lanes make a mask from
// `positions`.
//
// Bank conflicts: the 16-byte halves of a slot are swapped where slot / 4 is odd, so that the same half of eight consecutive
// slots lies in different banks. Bound: not profiled.
//
// Compiled with KEEP, WINDOW (a power of two up to 32), LENGTH (a multiple of 16) and the macros of gemm.cuh.

#include "expand_gemm/gemm.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/integer.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kMaskColumns = 32;
constexpr int kMasks = kTileColumns / kMaskColumns;  // per tile
constexpr int kMaskSlots = kMaskColumns / WINDOW * KEEP;
constexpr int kTileSlots = kMasks * kMaskSlots;
constexpr int kLanesPerMask = kWarpSize / kMasks;
constexpr int kLaneSlots = (kMaskSlots + kLanesPerMask - 1) / kLanesPerMask;  // whose positions a lane loads
constexpr int kSlotBytes = kTileRows * 2;
constexpr int kSlotsBytes = kTileSlots * kSlotBytes;  // of a tile, whose masks follow
constexpr int kMasksBytes = kMasks * 4;
constexpr int kZeroBytes = 16;                       // per warp
constexpr int kMostConsumers = (kConsumerWarps + kProducerWarps - 1) / kProducerWarps;  // of a producer warp
static_assert(kMaskColumns % WINDOW == 0 && LENGTH % kTileRows == 0, "whole windows in a mask, whole tiles in a group");

// Byte offset in a tile of a half of a slot; `half` is 0 or 16.
__device__ __forceinline__ Word half_at(Word slot, Word half) { return slot * kSlotBytes | ((slot * 4 ^ half) & 16); }

struct SlotExpander {
    Word tile, zeros;       // shared-memory addresses
    Word bit[2], below[2];  // by k-step of a mask: the bit of the lane's column, and all bits below it
    Word half;              // of a slot that the lane reads: 0 or 16
    Word masks[kMasks];

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int index = step / 2, first = index * kMaskSlots;  // of the mask, and its first slot
        const Word mask = masks[index];
        // The swap of halves repeats every eight slots: a multiple of them is a compile-time offset of the address.
        const Word slot = __popc(mask & below[step % 2]) + (first % 8 ? first : 0);
        // opaque: else the compiler branches around the address instead of selecting it.
        const Word address = opaque(tile + (first % 8 ? 0 : first * kSlotBytes) + half_at(slot, half));
        ldmatrix_x4_trans(fragment, mask & bit[step % 2] ? address : zeros);
    }
};

struct SlotStream;

// A vector_nm weight.
struct Vectors {
    static constexpr int kTileBytes = kSlotsBytes + kMasksBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kZeroBytes;
    static constexpr int kProducerRegisters = 56;
    static constexpr int kProducers = kProducerWarps * kWarpSize * 2;  // a lane arrives for its copies, and for its masks
    using Stream = SlotStream;

    const unsigned short* values;    // [groups, slots, LENGTH]
    const unsigned char* positions;  // [groups, slots]
    int slots, row_tiles;

    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const;
};

// What a producer lane loads of the positions of a tile: those of kLaneSlots slots of one mask.
struct Positions {
    unsigned char slots[kLaneSlots];
    int left;  // slots from the lane's first to the end of its mask or the weight; may be negative

    __device__ __forceinline__ void load(const Vectors& weight, int row_tile, int column, int lane) {
        const int own = lane % kLanesPerMask * kLaneSlots;  // the lane's first slot of its mask
        const int begin = column * kTileSlots + lane / kLanesPerMask * kMaskSlots + own;
        left = min(kMaskSlots - own, weight.slots - begin);
        const unsigned char* from =
            weight.positions + static_cast<long long>(row_tile * kTileRows / LENGTH) * weight.slots + begin;
#pragma unroll
        for (int i = 0; i < kLaneSlots; ++i)
            if (i < left) slots[i] = from[i];
    }

    // Stores the tile's masks.
    __device__ __forceinline__ void store_masks(Word to, int lane) const {
        Word mask = 0;
#pragma unroll
        for (int i = 0; i < kLaneSlots; ++i)
            mask |= i < left ? 1u << (slots[i] + (lane % kLanesPerMask * kLaneSlots + i) / KEEP * WINDOW) : 0;
#pragma unroll
        for (int step = 1; step < kLanesPerMask; step *= 2) mask |= __shfl_xor_sync(~0u, mask, step);
        if (lane % kLanesPerMask == 0) st_shared(to + lane / kLanesPerMask * 4, mask);
    }
};

// Copies a tile; a lane copies half a slot at a time.
__device__ __forceinline__ void copy_tile(const Vectors& weight, Word to, int row_tile, int column, int lane) {
    const int rows = row_tile * kTileRows, begin = column * kTileSlots + lane / 2;
    const char* own = reinterpret_cast<const char*>(weight.values + rows % LENGTH + lane % 2 * 8);
    const char* from = mad_wide(rows / LENGTH * weight.slots + begin, 2 * LENGTH, own);
    const Word at = to + half_at(lane / 2, lane % 2 * 16);
    const int left = min(weight.slots - begin, kTileSlots - lane / 2);
#pragma unroll
    for (int slot = 0; slot < kTileSlots; slot += kWarpSize / 2)
        if (slot < left) cp_async_16_prefetch_128(at + slot * kSlotBytes, from + slot * 2 * LENGTH);
}

// Producer warp `warp` fills the tiles of consumers warp, warp + kProducerWarps, ... Positions are loaded a tile ahead.
__device__ __forceinline__ void Vectors::produce(const StreamMemory& memory, const WorkRanges& work, int first, int last,
                                                 int warp, int lane) const {
    Positions positions[kMostConsumers];
    TileCursor tile(work, first, warp);  // of the warp's first consumer
    auto row_tile = [&](int i) { return min(tile.weight_row + i * kProducerWarps, row_tiles - 1); };
    auto load_positions = [&] {
#pragma unroll
        for (int i = 0; i < kMostConsumers; ++i) positions[i].load(*this, row_tile(i), tile.column, lane);
    };
    load_positions();
    PipelineState<STAGES> state;
#pragma unroll 1
    for (int iteration = first; iteration < last; ++iteration, state.advance()) {
        const Word full = memory.pipeline.full(state.stage);
        mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
#pragma unroll
        for (int i = 0; i < kMostConsumers; ++i) {
            const int consumer = warp + i * kProducerWarps;
            if (consumer >= kConsumerWarps) break;
            const Word to = memory.tiles + (state.stage * kConsumerWarps + consumer) * kTileBytes;
            copy_tile(*this, to, row_tile(i), tile.column, lane);
            positions[i].store_masks(to + kSlotsBytes, lane);
        }
        cp_async_mbarrier_arrive_noinc(full);
        mbarrier_arrive(full);  // for the masks
        tile.advance();
        if (iteration + 1 < last) load_positions();
    }
}

// A consumer warp's tiles: the type Stream of expand_gemm/gemm.cuh.
struct SlotStream {
    Pipeline pipeline;
    Word tiles;  // the warp's, of stage 0
    int lane;
    PipelineState<STAGES> state;
    SlotExpander expander;

    __device__ __forceinline__ SlotStream(const Vectors&, const StreamMemory& memory, const WorkRanges&, int, int, int warp, int lane)
        : pipeline(memory.pipeline), tiles(memory.tiles + warp * Vectors::kTileBytes), lane(lane) {
        expander.zeros = memory.extra + warp * kZeroBytes;
        expander.half = lane / 8 % 2 * 16;
        const int column = lane / 16 * 8 + lane % 8;  // of matrix lane / 8
        expander.bit[0] = 1u << column, expander.bit[1] = 1u << (column + 16);
        expander.below[0] = expander.bit[0] - 1, expander.below[1] = expander.bit[1] - 1;
        if (lane == 0) st_shared_v4(expander.zeros, uint4{0, 0, 0, 0});
        __syncwarp();
    }

    __device__ __forceinline__ SlotExpander& acquire(int) {
        expander.tile = tiles + state.stage * kConsumerWarps * Vectors::kTileBytes;
        mbarrier_wait_parity(pipeline.full(state.stage), state.parity);
#pragma unroll
        for (int i = 0; i < kMasks; i += 4) {
            Word four[4];
            ld_shared_ordered(four, expander.tile + kSlotsBytes + i * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) expander.masks[i + j] = four[j];
        }
        return expander;
    }

    __device__ __forceinline__ void release(int) {
        mbarrier_arrive_warp(pipeline.empty(state.stage), lane);
        state.advance();
    }
};

extern "C" __global__ void __cluster_dims__(kClusterCtas, 1, 1)
EXPAND_GEMM_BOUNDS semisparse_vector_nm_gemm_wgmma(
    const unsigned char* __restrict__ x,          // as permute_x.cu stores it, with BLOCK = 2
    const unsigned short* __restrict__ values,    // [groups, slots, LENGTH]
    const unsigned char* __restrict__ positions,  // [groups, slots]
    const SCALAR* __restrict__ bias,              // [n] or null
    SCALAR* __restrict__ y,                       // [m, n]
    float4* partials,                             // [CTAs, kConsumerWarps, kTokenGroups, kWarpSize]
    int* counters,                                // [CTAs, kConsumerWarps], zeros
    int m, int n, int row_tiles, int column_tiles, int slots
) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Vectors weight{values, positions, slots, row_tiles};
    expand_gemm(weight, {x, bias, y, {partials, counters}, m, n, row_tiles, column_tiles}, shared);
}
