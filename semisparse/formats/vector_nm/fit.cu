// Puts columns in fours of which no part of a tile's rows keeps more than two: a greedy search, a block of threads for each tile.
//
// Fours that may still take a column are open, each a thread's. A column goes where it leaves every part the nearest to one kept
// of two that are still free, without making 64 rows multiply a four that they did not need before; where nothing is good
// enough, a new four is opened. Threads of equal merit give way to the lowest, so that every run finds the same fours.
//
// A four's state is two bits a part, how many it keeps: 16 bits, of which four are a set of 64 rows.

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOwn = 2;                   // open fours of a thread
constexpr int kOpen = kThreads * kOwn;
constexpr int kNewFour = -60;             // merit of opening one
constexpr int kNewSet = 32;               // what it costs that 64 rows come to need a four
constexpr int kBias = 4096;               // makes merits positive

struct Four {
    Word kept = 0;
    int size = 0;
    int number = 0;
};

// Two bits of value 1 for each part that a column is kept by.
__device__ __forceinline__ Word spread(Word type) {
    Word found = 0;
#pragma unroll
    for (int part = 0; part < 8; ++part) found |= (type >> part & 1) << 2 * part;
    return found;
}

// A bit for each set of rows that keeps something.
__device__ __forceinline__ Word sets_of(Word kept) { return (kept | kept >> 1 | kept >> 2 | kept >> 3) & 0x1111; }

__device__ __forceinline__ int fourth(int value) { return value * value * value * value; }

// How well a column fits, or what a new four is worth; negative where it does not.
__device__ __forceinline__ int merit(const Four& four, Word column) {
    if (four.size == 0) return kBias + kNewFour;
    if (four.kept >> 1 & column) return -1;
    const Word kept = four.kept + column, sets = sets_of(kept), parts = sets * 5;  // one bit a part
    const int room = 3 - four.size;
    const int full = __popc(kept >> 1 & parts), half = __popc(kept & parts);
    const int none = 2 * __popc(sets) - full - half;
    return kBias - none * fourth(4 - room) - half * fourth(2 - room) - full * fourth(room) - kNewSet * (__popc(sets) - __popc(sets_of(four.kept)));
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_fit(
    const int* __restrict__ order,           // [tiles, width]: the columns in the order in which they are placed
    const unsigned char* __restrict__ types, // [tiles, width]: of those, a bit for each part that keeps it; 0 from the last on
    int* __restrict__ fours,                 // [tiles, width, 4], -1 everywhere
    int* __restrict__ counts,                // [tiles]: fours of each
    int width
) {
    __shared__ int best[2][kWarps];
    const long long first = static_cast<long long>(blockIdx.x) * width;
    Four own[kOwn];
    int opened = 0, closed = 0;
    for (int i = 0; i < width && types[first + i]; ++i) {
        const Word column = spread(types[first + i]);
        int mine = -1;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            const int found = merit(own[j], column), slot = j * kThreads + threadIdx.x;
            if (found >= 0) mine = max(mine, found << 11 | (kOpen - 1 - slot) << 1 | (own[j].size == 0));
        }
        mine = __reduce_max_sync(0xffffffffu, mine);
        if (threadIdx.x % kWarp == 0) best[i % 2][threadIdx.x / kWarp] = mine;
        __syncthreads();
        int winner = best[i % 2][0];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) winner = max(winner, best[i % 2][warp]);
        // With all open and none that fits, they are given up in turn.
        const int slot = winner < 0 ? closed++ % kOpen : kOpen - 1 - (winner >> 1 & (kOpen - 1));
        const bool opens = winner < 0 || winner & 1;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            if (slot != j * kThreads + static_cast<int>(threadIdx.x)) continue;
            if (opens) own[j] = {0, 0, opened};
            fours[(first + own[j].number) * 4 + own[j].size] = order[first + i];
            own[j].kept += column;
            if (++own[j].size == 4) own[j] = {};
        }
        opened += opens;
    }
    if (threadIdx.x == 0) counts[blockIdx.x] = opened;
}
