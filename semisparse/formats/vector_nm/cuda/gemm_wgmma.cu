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
#include "ptx/ldmatrix.cuh"

constexpr int kStretch = 32;                          // columns of a mask
constexpr int kStretches = kTileColumns / kStretch;   // of a tile
constexpr int kStretchSlots = kStretch / WINDOW * KEEP;
constexpr int kTileSlots = kStretches * kStretchSlots;
constexpr int kSlotBytes = kTileRows * 2;
constexpr int kZeroBytes = 16;                        // per warp

__device__ __forceinline__ Word half_at(Word slot, Word half) { return slot * kSlotBytes + ((half ^ (slot >> 2 & 1)) << 4); }

struct SlotExpander {
    Word tile, zeros;       // in shared memory
    Word bits[kStretches];  // of each mask, the bit of the lane's slot
    Word mask = 0;
    int lane;

    template <int step>
    __device__ __forceinline__ void expand(Word (&fragment)[4]) {
        constexpr int stretch = step / 2;
        if constexpr (step % 2 == 0) mask = __reduce_or_sync(~0u, bits[stretch]);
        const Word column = step % 2 * 16 + lane / 16 * 8 + lane % 8;  // of matrix lane / 8
        const Word slot = stretch * kStretchSlots + __popc(mask & ((1u << column) - 1));
        const bool kept = mask >> column & 1;
        ldmatrix_x4_trans(fragment, kept ? tile + half_at(slot, lane / 8 % 2) : zeros);
    }
};

struct Vectors;

struct SlotStream {
    const Vectors& weight;
    WorkRanges work;
    int first, last;  // iterations
    int warp, lane;
    Word tiles, zeros;
    Word next[kStretches];  // bits of the next tile

    __device__ __forceinline__ SlotStream(const Vectors& weight, StreamMemory memory, WorkRanges work, int first, int last,
                                          int warp, int lane)
        : weight(weight), work(work), first(first), last(last), warp(warp), lane(lane), tiles(memory.tiles),
          zeros(memory.extra + warp * kZeroBytes) {
        if (lane == 0) st_shared_v4(zeros, uint4{0, 0, 0, 0});
        load_bits(first);
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) copy(first + i);
    }

    __device__ __forceinline__ SlotExpander acquire(int iteration) {
        SlotExpander expander{tile_at(iteration), zeros};
        expander.lane = lane;
#pragma unroll
        for (int i = 0; i < kStretches; ++i) expander.bits[i] = next[i];
        load_bits(iteration + 1);
        cp_async_wait_group<STAGES - 1>();
        __syncwarp();
        return expander;
    }

    __device__ __forceinline__ void release(int iteration) {
        __syncwarp();  // all lanes have read the tile
        copy(iteration + STAGES);
    }

  private:
    __device__ __forceinline__ Word tile_at(int iteration) const;
    __device__ __forceinline__ int row_tile(int iteration) const;
    __device__ __forceinline__ void load_bits(int iteration);
    __device__ __forceinline__ void copy(int iteration) const;
};

// A vector_nm weight.
struct Vectors {
    static constexpr int kTileBytes = kTileSlots * kSlotBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kZeroBytes;
    static constexpr bool kBulk = false;
    using Stream = SlotStream;

    const unsigned short* values;    // [groups, slots, LENGTH]
    const unsigned char* positions;  // [groups, slots]
    int slots, row_tiles;
};

__device__ __forceinline__ Word SlotStream::tile_at(int iteration) const {
    return tiles + (iteration - first) % STAGES * kConsumerWarps * Vectors::kTileBytes;
}

// Rows past the last tile repeat it.
__device__ __forceinline__ int SlotStream::row_tile(int iteration) const {
    return min(work.row_tile(work.tile(iteration)) + warp, weight.row_tiles - 1);
}

// Loads the positions of a tile's slots, of which each lane has one per mask, as bits.
__device__ __forceinline__ void SlotStream::load_bits(int iteration) {
    const int begin = iteration < last ? work.column(iteration) * kTileSlots : weight.slots;
    const int group = iteration < last ? row_tile(iteration) * kTileRows / LENGTH : 0;
    const unsigned char* from = weight.positions + static_cast<long long>(group) * weight.slots;
#pragma unroll
    for (int i = 0; i < kStretches; ++i) {
        const int slot = begin + i * kStretchSlots + lane;
        next[i] = lane < kStretchSlots && slot < weight.slots ? 1u << (from[slot] + lane / KEEP * WINDOW) : 0;
    }
}

// Copies the warp's rows of a tile, as one cp.async group: half a slot per lane.
__device__ __forceinline__ void SlotStream::copy(int iteration) const {
    if (iteration < last) {
        const int rows = row_tile(iteration) * kTileRows, begin = work.column(iteration) * kTileSlots;
        const long long at = static_cast<long long>(rows / LENGTH) * weight.slots + begin;
        const unsigned short* from = weight.values + at * LENGTH + rows % LENGTH + lane % 2 * 8;
        const Word to = tile_at(iteration);
#pragma unroll
        for (int slot = lane / 2; slot < kTileSlots; slot += kWarpSize / 2)
            if (begin + slot < weight.slots)
                cp_async_16(to + half_at(slot, lane % 2), from + slot * LENGTH);
    }
    cp_async_commit_group();
}

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
