// Assigns the columns of each row tile to quads of four, of which a slice of 32 rows keeps at most two: a greedy search
// (README.md, "The GPU layout"). Its result is the column order in which the weight is 2:4.
//
// Grid: one CTA per row tile of 256 rows. CTA: 256 threads. Shared memory: 64 bytes, the best score of each warp, double-
// buffered. A thread has two slots for open quads, those that can still take a column. Columns are placed one after another,
// each into the slot of the highest score; an empty slot begins a new quad. Ties go to the lowest slot, so that every run
// returns the same order.
//
// Score: minus the sum of (2 * free - room)^4 over the slices of the 64-row tiles that need the quad, minus kNewMmaTile for
// each tile that did not need it before. After placing, the quad can take `room` more columns, and the slice can keep `free`
// more of the quad. A quad has two bits for each slice: how many of its columns the slice keeps.
// Bound: latency, one reduction over the CTA per column. 8 ms for 4096 x 4096, the rest of the ordering included (H200).

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kThreadQuads = 2;           // open quads of a thread
constexpr int kOpen = kThreads * kThreadQuads;
constexpr int kNewQuad = -60;             // score of a new quad
constexpr int kNewMmaTile = 32;           // cost of a 64-row tile that did not need the quad before
constexpr int kBias = 4096;               // makes scores positive

struct Quad {
    Word kept = 0;
    int size = 0;
    int number = 0;
};

// Two bits per slice: 01 if it keeps the column, else 00.
__device__ __forceinline__ Word spread(Word slices) {
    Word spread = 0;
#pragma unroll
    for (int slice = 0; slice < 8; ++slice) spread |= (slices >> slice & 1) << 2 * slice;
    return spread;
}

// Bit 4 t: 64-row tile t keeps a column of the quad.
__device__ __forceinline__ Word mma_tiles(Word kept) { return (kept | kept >> 1 | kept >> 2 | kept >> 3) & 0x1111; }

__device__ __forceinline__ int fourth_power(int value) { return value * value * value * value; }

// The score of placing a column in a quad; negative if a slice would keep more than two.
__device__ __forceinline__ int score(const Quad& quad, Word column) {
    if (quad.size == 0) return kBias + kNewQuad;
    if (quad.kept >> 1 & column) return -1;
    const Word kept = quad.kept + column, tiles = mma_tiles(kept), slices = tiles * 5;  // one bit per slice of the tiles
    const int room = 3 - quad.size;
    const int two = __popc(kept >> 1 & slices), one = __popc(kept & slices);
    const int none = 2 * __popc(tiles) - two - one;
    return kBias - none * fourth_power(4 - room) - one * fourth_power(2 - room) - two * fourth_power(room) -
           kNewMmaTile * (__popc(tiles) - __popc(mma_tiles(quad.kept)));
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_assign(
    const int* __restrict__ columns,           // [row_tiles, width], in the order of placement
    const unsigned char* __restrict__ slices,  // [row_tiles, width], a bit per slice that keeps the column; 0: no column
    int* __restrict__ quads,                   // [row_tiles, width, 4], columns; -1 at launch
    int* __restrict__ counts,                  // [row_tiles], number of quads
    int width
) {
    __shared__ int best[2][kWarps];
    const long long first = static_cast<long long>(blockIdx.x) * width;
    Quad own[kThreadQuads];
    int opened = 0, closed = 0;
    for (int i = 0; i < width && slices[first + i]; ++i) {
        const Word column = spread(slices[first + i]);
        int mine = -1;  // packed: score, inverted slot, and whether it is empty
#pragma unroll
        for (int j = 0; j < kThreadQuads; ++j) {
            const int fit = score(own[j], column), slot = j * kThreads + threadIdx.x;
            if (fit >= 0) mine = max(mine, fit << 11 | (kOpen - 1 - slot) << 1 | (own[j].size == 0));
        }
        mine = __reduce_max_sync(0xffffffffu, mine);
        if (threadIdx.x % kWarp == 0) best[i % 2][threadIdx.x / kWarp] = mine;
        __syncthreads();
        int winner = best[i % 2][0];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) winner = max(winner, best[i % 2][warp]);
        // If every slot is open and no quad fits, close one, round-robin.
        const int slot = winner < 0 ? closed++ % kOpen : kOpen - 1 - (winner >> 1 & (kOpen - 1));
        const bool opens = winner < 0 || winner & 1;
#pragma unroll
        for (int j = 0; j < kThreadQuads; ++j) {
            if (slot != j * kThreads + static_cast<int>(threadIdx.x)) continue;
            if (opens) own[j] = {0, 0, opened};
            quads[(first + own[j].number) * 4 + own[j].size] = columns[first + i];
            own[j].kept += column;
            if (++own[j].size == 4) own[j] = {};
        }
        opened += opens;
    }
    if (threadIdx.x == 0) counts[blockIdx.x] = opened;
}
