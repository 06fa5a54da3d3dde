// Writes the dense weight w[n, k] for cuBLAS: the kept vectors, and zeros between them.
//
// Reads: the tensors of README.md, "Layout".
// Grid: (tiles of kTileColumns columns, tiles of up to 32 rows). CTA: 256 threads. Shared memory: the dense tile, [32,
// kPitch].
// Warps: all zero the tile, scatter the vectors of its windows into it, as columns, and store its rows: loads and stores
// are both consecutive.
// Bound: memory. 4096 x 4096 at 16:32v32 takes 18 to 20 us, where its bytes take 12 at full DRAM bandwidth; with one weight
// per thread and load it took 31 us (H200).
//
// Macros: BYTES (of a weight, 2 or 4), KEEP, WINDOW, LENGTH.

#include "element.cuh"

constexpr int kTileRows = 32;
constexpr int kGroupRows = LENGTH < kTileRows ? LENGTH : kTileRows;           // rows of a group in a tile
constexpr int kTilesPerGroup = (LENGTH + kGroupRows - 1) / kGroupRows;
constexpr int kGroups = kTileRows / kGroupRows;                               // per tile
constexpr int kWindows = WINDOW < 128 ? 128 / WINDOW : 1;                     // per tile
constexpr int kTileColumns = kWindows * WINDOW;
constexpr int kTileSlots = kWindows * KEEP;
constexpr int kPerWord = 4 / BYTES;
constexpr int kPerLoad = LENGTH % (16 / BYTES) == 0 ? 16 / BYTES : 1;         // rows of a vector that a thread loads at once
constexpr int kRowWords = (kTileColumns + kPerWord - 1) / kPerWord | 1;       // odd: no bank conflicts along a column
constexpr int kPitch = kRowWords * kPerWord;

struct alignas(kPerLoad * BYTES) Loaded {
    Element rows[kPerLoad];
};

struct Tile {
    int first_group, first_row;  // the row inside its group

    // Returns the weight's row at row `row` of the tile, n if there is none.
    __device__ __forceinline__ int row(int row, int n) const {
        const int of_group = first_row + row % kGroupRows;
        const long long of_weight = (first_group + row / kGroupRows) * static_cast<long long>(LENGTH) + of_group;
        return of_group < LENGTH && of_weight < n ? static_cast<int>(of_weight) : n;
    }
};

// Stores the tile's rows, one `Piece` per thread at a time.
template <typename Piece>
__device__ __forceinline__ void store_rows(const Tile& tile, const Element* from, Element* weight, int n, int k) {
    constexpr int per_piece = sizeof(Piece) / sizeof(Element);
    constexpr int per_row = kTileColumns / per_piece;
#pragma unroll 4
    for (int i = threadIdx.x; i < kGroups * kGroupRows * per_row; i += kThreads) {
        const int row = tile.row(i / per_row, n);
        const int column = blockIdx.x * kTileColumns + i % per_row * per_piece;
        if (row < n && column < k) {
            *reinterpret_cast<Piece*>(weight + static_cast<long long>(row) * k + column) =
                *reinterpret_cast<const Piece*>(from + i / per_row * kPitch + i % per_row * per_piece);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_unpack(
    const Element* __restrict__ values, const unsigned char* __restrict__ positions, Element* __restrict__ weight,
    int n, int k, int groups, int slots
) {
    extern __shared__ uint4 shared[];
    Word* words = reinterpret_cast<Word*>(shared);
    Element* elements = reinterpret_cast<Element*>(shared);
    const Tile tile{static_cast<int>(blockIdx.y) / kTilesPerGroup * kGroups,
                    static_cast<int>(blockIdx.y) % kTilesPerGroup * kGroupRows};
    for (int i = threadIdx.x; i < kGroups * kGroupRows * kRowWords; i += kThreads) words[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < kGroups * kTileSlots * (kGroupRows / kPerLoad); i += kThreads) {
        const int row = i % (kGroupRows / kPerLoad) * kPerLoad;
        const int slot = i / (kGroupRows / kPerLoad) % kTileSlots;
        const int group = i / (kGroupRows / kPerLoad * kTileSlots);
        const int of_group = blockIdx.x * kTileSlots + slot;
        if (tile.first_group + group >= groups || of_group >= slots || tile.first_row + row >= LENGTH) continue;
        const long long at = static_cast<long long>(tile.first_group + group) * slots + of_group;
        const Loaded loaded = *reinterpret_cast<const Loaded*>(values + at * LENGTH + tile.first_row + row);
        Element* column = elements + (group * kGroupRows + row) * kPitch + slot / KEEP * WINDOW + positions[at];
#pragma unroll
        for (int j = 0; j < kPerLoad; ++j) column[j * kPitch] = loaded.rows[j];
    }
    __syncthreads();
    if (kTileColumns % kPerWord == 0 && k % kPerWord == 0) {
        store_rows<Word>(tile, elements, weight, n, k);
    } else {
        store_rows<Element>(tile, elements, weight, n, k);
    }
}
