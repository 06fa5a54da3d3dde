// y[m, n] = x[m, k] @ w[n, k].T + bias[n] in float16 or bfloat16 for any m, straight from kept vectors, with Hopper's wgmma:
// expand_gemm/gemm.cuh (grid, CTA, shared memory). Each consumer warp copies its tiles by cp.async, STAGES ahead.
//
// A slot of a tile is 16 rows of a kept vector: 32 bytes. ldmatrix.trans loads fragments from slots, so expanding takes no
// stores: each lane gives the address of one column's slot, or of zeros if the column is not kept. A mask has a bit for each
// of 32 columns, set if it is kept; a column's slot is the number of set bits below. Four lanes make a mask from `positions`.
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
constexpr int kZeroBytes = 16;                       // per warp
static_assert(kMaskColumns % WINDOW == 0 && LENGTH % kTileRows == 0, "whole windows in a mask, whole tiles in a group");

// Byte offset in a tile of a half of a slot; `half` is 0 or 16.
__device__ __forceinline__ Word half_at(Word slot, Word half) { return slot * kSlotBytes | ((slot * 4 ^ half) & 16); }

struct SlotExpander {
    Word tile, zeros;       // shared-memory addresses
    Word bit[2], below[2];  // by k-step of a mask: the bit of the lane's column, and all bits below it
    Word half;              // of a slot that the lane reads: 0 or 16
    Word mine, mask;        // mask lane / kLanesPerMask, and the mask of the current k-step

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int index = step / 2, first = index * kMaskSlots;  // of the mask, and its first slot
        if constexpr (step % 2 == 0) mask = __shfl_sync(~0u, mine, index * kLanesPerMask);
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
    static constexpr int kTileBytes = kTileSlots * kSlotBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kZeroBytes;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kProducers = 0;
    using Stream = SlotStream;

    const unsigned short* values;    // [groups, slots, LENGTH]
    const unsigned char* positions;  // [groups, slots]
    int slots, row_tiles;
};

// Copies a consumer warp's tiles and computes their masks.
struct SlotStream {
    const Vectors& weight;
    TileCursor copied, loaded;  // the next tile to copy, and the next to load positions of
    int last;                   // end of the iterations, exclusive
    int lane;
    Word tiles;                 // the warp's tile of stage 0
    int stage = 0;              // of the current tile, refilled next
    SlotExpander expander;
    Word positions[kLaneSlots]; // the lane's, of the next tile; loaded one tile ahead
    int left;                   // slots from the lane's first to the end of its mask or the weight; may be negative

    __device__ __forceinline__ SlotStream(const Vectors& weight, StreamMemory memory, WorkRanges work, int first, int last,
                                          int warp, int lane)
        : weight(weight), copied(work, first, warp, weight.row_tiles), loaded(copied), last(last), lane(lane),
          tiles(memory.tiles + warp * Vectors::kTileBytes) {
        expander.zeros = memory.extra + warp * kZeroBytes;
        expander.half = lane / 8 % 2 * 16;
        const int column = lane / 16 * 8 + lane % 8;  // of matrix lane / 8
        expander.bit[0] = 1u << column, expander.bit[1] = 1u << (column + 16);
        expander.below[0] = expander.bit[0] - 1, expander.below[1] = expander.bit[1] - 1;
        if (lane == 0) st_shared_v4(expander.zeros, uint4{0, 0, 0, 0});
        load_positions();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) copy(tiles + i * kConsumerWarps * Vectors::kTileBytes);
    }

    __device__ __forceinline__ SlotExpander& acquire(int) {
        expander.tile = tiles + stage * kConsumerWarps * Vectors::kTileBytes;
        expander.mine = 0;
#pragma unroll
        for (int i = 0; i < kLaneSlots; ++i)
            expander.mine |= i < left ? 1u << (positions[i] + (lane % kLanesPerMask * kLaneSlots + i) / KEEP * WINDOW) : 0;
#pragma unroll
        for (int step = 1; step < kLanesPerMask; step *= 2) expander.mine |= __shfl_xor_sync(~0u, expander.mine, step);
        load_positions();
        cp_async_wait_group<STAGES - 1>();
        __syncwarp();
        return expander;
    }

    __device__ __forceinline__ void release(int) {
        __syncwarp();  // all lanes have read the tile
        copy(expander.tile);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

  private:
    // Loads the next tile's positions: each lane those of kLaneSlots slots of one mask.
    __device__ __forceinline__ void load_positions() {
        const int own = lane % kLanesPerMask * kLaneSlots;  // the lane's first slot of its mask
        const int begin = loaded.column * kTileSlots + lane / kLanesPerMask * kMaskSlots + own;
        left = loaded.iteration < last ? min(kMaskSlots - own, weight.slots - begin) : 0;
        const unsigned char* from =
            weight.positions + static_cast<long long>(loaded.row_tile * kTileRows / LENGTH) * weight.slots + begin;
#pragma unroll
        for (int i = 0; i < kLaneSlots; ++i)
            if (i < left) positions[i] = from[i];
        loaded.advance();
    }

    // Copies the warp's next tile as one cp.async group; a lane copies half a slot at a time.
    __device__ __forceinline__ void copy(Word to) {
        if (copied.iteration < last) {
            const int rows = copied.row_tile * kTileRows, begin = copied.column * kTileSlots + lane / 2;
            const char* own = reinterpret_cast<const char*>(weight.values + rows % LENGTH + lane % 2 * 8);
            const char* from = mad_wide(rows / LENGTH * weight.slots + begin, 2 * LENGTH, own);
            const Word at = to + half_at(lane / 2, lane % 2 * 16);
            const int left = min(weight.slots - begin, kTileSlots - lane / 2);
#pragma unroll
            for (int slot = 0; slot < kTileSlots; slot += kWarpSize / 2)
                if (slot < left) cp_async_16_prefetch_128(at + slot * kSlotBytes, from + slot * 2 * LENGTH);
        }
        cp_async_commit_group();
        copied.advance();
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
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
