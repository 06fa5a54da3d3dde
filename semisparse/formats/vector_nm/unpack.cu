// w[n, k] from its kept vectors, zeros between them, for a dense product.
//
// A block brings a tile of up to 32 rows and some windows together in shared memory: vectors are columns there, as they are
// stored, and leave as rows, so that both sides of the way are consecutive.
//
// Compiled for BYTES (2 or 4, of a weight), KEEP, WINDOW and LENGTH.

#include "element.cuh"

constexpr int kRows = 32;
constexpr int kSlice = LENGTH < kRows ? LENGTH : kRows;        // rows of a group in a tile
constexpr int kSlices = (LENGTH + kSlice - 1) / kSlice;        // tiles along a group
constexpr int kGroups = kRows / kSlice;                        // of a tile
constexpr int kWindows = WINDOW < 128 ? 128 / WINDOW : 1;      // of a tile
constexpr int kColumns = kWindows * WINDOW;
constexpr int kSlots = kWindows * KEEP;
constexpr int kOfWord = 4 / BYTES;
constexpr int kOfLoad = LENGTH % (16 / BYTES) == 0 ? 16 / BYTES : 1;  // rows of a vector that a thread loads at a time
constexpr int kWords = (kColumns + kOfWord - 1) / kOfWord | 1;  // of a row; odd, so that a vector meets in no bank
constexpr int kPitch = kWords * kOfWord;

struct alignas(kOfLoad * BYTES) Loaded {
    Element rows[kOfLoad];
};

struct Tile {
    int first_group, first_row;  // the row inside its group

    // The row of the weight in row `row` of the tile, or n where there is none.
    __device__ __forceinline__ int row(int row, int n) const {
        const int of_group = first_row + row % kSlice;
        const long long found = (first_group + row / kSlice) * static_cast<long long>(LENGTH) + of_group;
        return of_group < LENGTH && found < n ? static_cast<int>(found) : n;
    }
};

// Writes the tile's rows, `Piece` by `Piece`.
template <typename Piece>
__device__ __forceinline__ void write(const Tile& tile, const Element* from, Element* weight, int n, int k) {
    constexpr int of_piece = sizeof(Piece) / sizeof(Element);
    constexpr int of_row = kColumns / of_piece;
#pragma unroll 4
    for (int i = threadIdx.x; i < kGroups * kSlice * of_row; i += kThreads) {
        const int row = tile.row(i / of_row, n);
        const int column = blockIdx.x * kColumns + i % of_row * of_piece;
        if (row < n && column < k) {
            *reinterpret_cast<Piece*>(weight + static_cast<long long>(row) * k + column) =
                *reinterpret_cast<const Piece*>(from + i / of_row * kPitch + i % of_row * of_piece);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_unpack(
    const Element* __restrict__ values, const unsigned char* __restrict__ positions, Element* __restrict__ weight,
    int n, int k, int groups, int total
) {
    extern __shared__ uint4 shared[];
    Word* words = reinterpret_cast<Word*>(shared);
    Element* elements = reinterpret_cast<Element*>(shared);
    const Tile tile{static_cast<int>(blockIdx.y) / kSlices * kGroups, static_cast<int>(blockIdx.y) % kSlices * kSlice};
    for (int i = threadIdx.x; i < kGroups * kSlice * kWords; i += kThreads) words[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < kGroups * kSlots * (kSlice / kOfLoad); i += kThreads) {
        const int row = i % (kSlice / kOfLoad) * kOfLoad;
        const int slot = i / (kSlice / kOfLoad) % kSlots;
        const int group = i / (kSlice / kOfLoad * kSlots);
        const int at = blockIdx.x * kSlots + slot;
        if (tile.first_group + group >= groups || at >= total || tile.first_row + row >= LENGTH) continue;
        const long long found = static_cast<long long>(tile.first_group + group) * total + at;
        const Loaded loaded = *reinterpret_cast<const Loaded*>(values + found * LENGTH + tile.first_row + row);
        Element* place = elements + (group * kSlice + row) * kPitch + slot / KEEP * WINDOW + positions[found];
#pragma unroll
        for (int j = 0; j < kOfLoad; ++j) place[j * kPitch] = loaded.rows[j];
    }
    __syncthreads();
    if (kColumns % kOfWord == 0 && k % kOfWord == 0) {
        write<Word>(tile, elements, weight, n, k);
    } else {
        write<Element>(tile, elements, weight, n, k);
    }
}
