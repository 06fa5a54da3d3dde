// Assigns the columns of each row tile to quads of which no slice of 32 rows keeps more than two: a greedy search
// (README.md, "The GPU layout"). Its result is the column order in which the weight is 2:4.
//
// Grid: one CTA per row tile of 256 rows. CTA: 256 threads. Shared memory: 64 bytes, the best fit of each warp. Every
// thread holds two open quads, which can still take a column. Columns are placed one after another, each into the open quad
// of the highest score, or into a new one if that scores higher. The score is minus the sum over slices of (2 * free -
// room)^4, with `room` the columns that the quad then still takes and `free` how many of them the slice may keep; a 64-row
// tile that begins to need the quad costs more. Ties go to the lowest number, so that every run makes the same order. A
// quad's state has two bits for each slice: how many of its columns the slice keeps. These are 16 bits, four for each
// 64-row tile.
// Bound: latency, one reduction over the CTA per column. 8 ms for 4096 x 4096 with the rest of the order (H200).

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kThreadQuads = 2;           // open quads of a thread
constexpr int kOpen = kThreads * kThreadQuads;
constexpr int kNewQuad = -60;             // score of opening one
constexpr int kNewMmaTile = 32;           // cost of a 64-row tile that begins to need the quad
constexpr int kBias = 4096;               // makes scores positive

struct Quad {
    Word kept = 0;
    int size = 0;
    int number = 0;
};

// 01 for each slice that keeps a column, 00 for the others.
__device__ __forceinline__ Word spread(Word slices) {
    Word spread = 0;
#pragma unroll
    for (int slice = 0; slice < 8; ++slice) spread |= (slices >> slice & 1) << 2 * slice;
    return spread;
}

// A bit for each 64-row tile that keeps something.
__device__ __forceinline__ Word mma_tiles(Word kept) { return (kept | kept >> 1 | kept >> 2 | kept >> 3) & 0x1111; }

__device__ __forceinline__ int fourth_power(int value) { return value * value * value * value; }

// The score of a column in a quad, or of a new quad; negative where it does not fit.
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
    const int* __restrict__ columns,           // [row_tiles, width]: in the order in which they are placed
    const unsigned char* __restrict__ slices,  // [row_tiles, width]: of each a bit per slice that keeps it; 0 past the last
    int* __restrict__ quads,                   // [row_tiles, width, 4], -1 everywhere
    int* __restrict__ counts,                  // [row_tiles]: quads of each
    int width
) {
    __shared__ int best[2][kWarps];
    const long long first = static_cast<long long>(blockIdx.x) * width;
    Quad own[kThreadQuads];
    int opened = 0, closed = 0;
    for (int i = 0; i < width && slices[first + i]; ++i) {
        const Word column = spread(slices[first + i]);
        int mine = -1;
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
        // If all are open and none fits, they are closed round-robin.
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
