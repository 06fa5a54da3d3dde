// A dense weight [n, k] from the layout `tiles` (tiles.py): one thread block takes 64 rows and so many blocks of K' that they hold
// whole groups. What is kept is scattered over the groups' columns in shared memory, and leaves it in rows.
//
// Macro: WIDE, bytes of a value: 1 or 2.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"

namespace {

#if WIDE == 1
using Value = unsigned char;
#else
using Value = unsigned short;
#endif

constexpr int kRows = 64, kValues = kRows * 64, kTile = kValues + 1024 / WIDE;
constexpr int kPieces = 4, kKept = 16 / WIDE;  // of a row in a tile, and values of a piece

// Two bits for each value of a row's piece, the first in the lowest.
__device__ __forceinline__ Word positions_of(const unsigned char* tile, int row, int piece) {
    const int thread = row / 16 * 32 + row % 8 * 4, upper = row / 8 % 2;
#if WIDE == 1
    return reinterpret_cast<const Word*>(tile + kValues)[piece / 2 * 128 + thread + upper + piece % 2 * 2];
#else
    return reinterpret_cast<const unsigned short*>(tile + kValues)[(thread + piece) * 2 + upper];
#endif
}

}  // namespace

extern __shared__ uint4 shared[];

// w is [blocks, tiles, bytes]; a thread block takes `together` blocks, of `columns` columns, of one tile. `half` is N of 2N - 2 of 2N.
extern "C" __global__ void semisparse_unpack(const unsigned char* w, Value* dense, int n, int k, int blocks, int tiles, int together,
                                             int columns, int half) {
    const int first_block = blockIdx.x * together, tile = blockIdx.y, windows = half - 1;
    const int pitch = columns + 16 / WIDE;  // another bank for the next row
    Value* rows = reinterpret_cast<Value*>(shared);
    for (int i = threadIdx.x; i < kRows * pitch * WIDE / 16; i += blockDim.x) shared[i] = {0, 0, 0, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < together * kPieces * kRows; i += blockDim.x) {
        const int row = i % kRows, piece = i / kRows % kPieces, block = i / kRows / kPieces;
        if (first_block + block >= blocks) break;
        const unsigned char* from = w + (static_cast<long long>(first_block + block) * tiles + tile) * kTile;
        const uint4 found = ld_global_nc_v4(from + piece * kRows * 16 + row * 16);
        const Value* values = reinterpret_cast<const Value*>(&found);
        const Word positions = positions_of(from, row, piece);
        const int first = (block * kPieces + piece) * (kKept / 2);  // window
        int within = first % windows, column = row * pitch + first / windows * 2 * half + 2 * within;
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const Value value = values[j];
            if (value) rows[column + (positions >> 2 * j & 3)] = value;
            if (j % 2) {
                column += 2;
                if (++within == windows) within = 0, column += 2;
            }
        }
    }
    __syncthreads();
    const int first_row = tile * kRows, first_column = blockIdx.x * columns, units = columns / (16 / WIDE);
    const bool aligned = k % (16 / WIDE) == 0 && columns % (16 / WIDE) == 0;
    if (aligned) {
        for (int i = threadIdx.x; i < kRows * units; i += blockDim.x) {
            const int row = i / units, column = i % units * (16 / WIDE);
            if (first_row + row < n && first_column + column < k)
                *reinterpret_cast<uint4*>(dense + static_cast<long long>(first_row + row) * k + first_column + column) =
                    *reinterpret_cast<const uint4*>(rows + row * pitch + column);
        }
    } else {
        for (int i = threadIdx.x; i < kRows * columns; i += blockDim.x) {
            const int row = i / columns, column = i % columns;
            if (first_row + row < n && first_column + column < k)
                dense[static_cast<long long>(first_row + row) * k + first_column + column] = rows[row * pitch + column];
        }
    }
}
