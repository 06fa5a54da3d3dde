// y[m, n] = x[m, k] @ w[n, k].T + bias[n] in float16 or bfloat16 for any m, straight from kept vectors, with Hopper's wgmma:
// expand_gemm/gemm.cuh on tiles of which each consumer warp copies its own 16 rows by cp.async, STAGES tiles ahead.
//
// In a tile the 16 rows of a slot are 32 bytes. ldmatrix transposes them on their way to fragments: each lane gives the address
// of one column, that of its slot, or of zeros where the column is not kept. So expanding takes no stores. Which slot a column
// has, a mask of 32 columns tells by the bits below its own; its bits are the positions of the slots, one per lane.
//
// Bank conflicts: the 16-byte halves of a slot are swapped in every other four slots, so that the same half of eight
// neighbouring slots lies in different banks.
//
// Compiled with KEEP, WINDOW (a power of two up to 32), LENGTH (a multiple of 16) and the macros of gemm.cuh.

#include "expand_gemm/gemm.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/integer.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kStretch = 32;                          // columns of a mask
constexpr int kStretches = kTileColumns / kStretch;   // of a tile
constexpr int kStretchSlots = kStretch / WINDOW * KEEP;
constexpr int kTileSlots = kStretches * kStretchSlots;
static_assert(kStretch % WINDOW == 0 && LENGTH % kTileRows == 0, "whole windows in a mask, whole tiles in a group");
constexpr int kSlotBytes = kTileRows * 2;
constexpr int kZeroBytes = 16;                        // per warp

__device__ __forceinline__ Word half_at(Word slot, Word half) { return slot * kSlotBytes + ((half ^ (slot >> 2 & 1)) << 4); }

struct SlotExpander {
    Word tile, zeros;       // in shared memory
    Word below[2], half;    // of the lane's column in both k-steps of a mask: the bits below it; the half of a slot that it reads
    Word bits[kStretches];  // of each mask, the bit of the lane's slot
    Word mask;

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int stretch = step / 2;
        if constexpr (step % 2 == 0) mask = __reduce_or_sync(~0u, bits[stretch]);
        const Word slot = stretch * kStretchSlots + __popc(mask & below[step % 2]);
        const Word address = opaque(tile + half_at(slot, half));  // opaque: a select, not a branch
        ldmatrix_x4_trans(fragment, mask & below[step % 2] + 1 ? address : zeros);
    }
};

// A vector_nm weight.
struct Vectors {
    static constexpr int kTileBytes = kTileSlots * kSlotBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kZeroBytes;
    static constexpr bool kBulk = false;
    using Stream = struct SlotStream;

    const unsigned short* values;    // [groups, slots, LENGTH]
    const unsigned char* positions;  // [groups, slots]
    int slots, row_tiles;
};

struct SlotStream {
    const Vectors& weight;
    TileCursor copied, loaded;  // the next tile to copy, and whose positions to load
    int last;                   // iteration
    int lane;
    Word tiles;
    int stage = 0;              // of the current tile, which is the next to be copied to
    SlotExpander expander;
    Word next[kStretches];      // bits of the next tile

    __device__ __forceinline__ SlotStream(const Vectors& weight, StreamMemory memory, WorkRanges work, int first, int last,
                                          int warp, int lane)
        : weight(weight), copied(work, first, warp, weight.row_tiles), loaded(copied), last(last), lane(lane),
          tiles(memory.tiles) {
        expander.zeros = memory.extra + warp * kZeroBytes;
        expander.half = lane / 8 % 2;
        const int column = lane / 16 * 8 + lane % 8;  // of matrix lane / 8
        expander.below[0] = (1u << column) - 1, expander.below[1] = (1u << (column + 16)) - 1;
        if (lane == 0) st_shared_v4(expander.zeros, uint4{0, 0, 0, 0});
        load_bits();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) copy(tiles + i * kConsumerWarps * Vectors::kTileBytes);
    }

    __device__ __forceinline__ SlotExpander& acquire(int) {
        expander.tile = tiles + stage * kConsumerWarps * Vectors::kTileBytes;
#pragma unroll
        for (int i = 0; i < kStretches; ++i) expander.bits[i] = next[i];
        load_bits();
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
    // Loads the positions of a tile's slots, of which each lane has one per mask, as bits.
    __device__ __forceinline__ void load_bits() {
        const int begin = loaded.column * kTileSlots + lane, group = loaded.row_tile * kTileRows / LENGTH;
        const int left = lane < kStretchSlots && loaded.iteration < last ? weight.slots - begin : 0;
        const unsigned char* from = weight.positions + static_cast<long long>(group) * weight.slots + begin;
#pragma unroll
        for (int i = 0; i < kStretches; ++i)
            next[i] = i * kStretchSlots < left ? 1u << (from[i * kStretchSlots] + lane / KEEP * WINDOW) : 0;
        loaded.advance();
    }

    // Copies the warp's rows of a tile, as one cp.async group: half a slot per lane.
    __device__ __forceinline__ void copy(Word to) {
        if (copied.iteration < last) {
            const int rows = copied.row_tile * kTileRows, begin = copied.column * kTileSlots + lane / 2;
            const long long at = static_cast<long long>(rows / LENGTH) * weight.slots + begin;
            const unsigned short* from = weight.values + at * LENGTH + rows % LENGTH + lane % 2 * 8;
            const Word half = half_at(lane / 2, lane % 2);
#pragma unroll
            for (int slot = 0; slot < kTileSlots; slot += kWarpSize / 2)
                if (slot + lane / 2 < kTileSlots && begin + slot < weight.slots)
                    cp_async_16(to + half + slot * kSlotBytes, from + slot * LENGTH);
        }
        cp_async_commit_group();
        copied.advance();
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(kThreads, CTAS_PER_SM) semisparse_vector_nm_gemm_wgmma(
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
