// Unpacks a weight from the layout `tiles` (README.md, "Layouts on a GPU") to dense [n, k], unscaled, bit for bit.
//
// Grid:    (spans of `span` K tiles, tiles of 64 rows); a span is the fewest K tiles that hold whole groups, `columns` columns
//          of w.
// CTA:     256 threads.
// Shared:  dynamic: 64 rows of `columns` values, zeroed, and 16 bytes of padding each, which put the next row in other banks.
// Threads: a thread takes 16 bytes of a row's values at a time and scatters them over the row by their metadata; then the CTA
//          stores the rows, in 16-byte units if they are aligned.
//
// Bound:   not profiled. At 6:8 37888 x 3584 takes 146 us in bfloat16 (3.69 bytes read and written per weight, at full DRAM
//          bandwidth 117 us) and 94 in fp8 (1.94 bytes, 62 us); 3584 x 18944 takes 86 (58) and 55 (31) (H200).
//
// Macro: WIDTH, bytes per value: 1 or 2.

#include "ptx/global.cuh"
#include "ptx/word.cuh"

namespace {

#if WIDTH == 1
using Value = unsigned char;
#else
using Value = unsigned short;
#endif

constexpr int kRows = 64, kValueBytes = kRows * 64, kTileBytes = kValueBytes + 1024 / WIDTH;
constexpr int kUnits = 4, kUnitValues = 16 / WIDTH;  // 16-byte units of a row in a tile, and values of a unit

// The metadata of a row's unit: two bits per value, the first value's lowest.
__device__ __forceinline__ Word metadata_of(const unsigned char* tile, int row, int unit) {
    const int thread = row / 16 * 32 + row % 8 * 4, upper = row / 8 % 2;
#if WIDTH == 1
    return reinterpret_cast<const Word*>(tile + kValueBytes)[unit / 2 * 128 + thread + upper + unit % 2 * 2];
#else
    return reinterpret_cast<const unsigned short*>(tile + kValueBytes)[(thread + unit) * 2 + upper];
#endif
}

}  // namespace

extern __shared__ uint4 shared[];

// tiles: [k_tiles, row_tiles, kTileBytes]; dense: [n, k]. A group has 2 * group_pairs columns.
extern "C" __global__ void semisparse_slide24_unpack(const unsigned char* tiles, Value* dense, int n, int k, int k_tiles,
                                                     int row_tiles, int span, int columns, int group_pairs) {
    const int first_k_tile = blockIdx.x * span, row_tile = blockIdx.y, windows = group_pairs - 1;
    const int pitch = columns + 16 / WIDTH;
    Value* rows = reinterpret_cast<Value*>(shared);
    for (int i = threadIdx.x; i < kRows * pitch * WIDTH / 16; i += blockDim.x) shared[i] = {0, 0, 0, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < span * kUnits * kRows; i += blockDim.x) {
        const int row = i % kRows, unit = i / kRows % kUnits, k_tile = i / kRows / kUnits;
        if (first_k_tile + k_tile >= k_tiles) break;
        const unsigned char* tile = tiles + (static_cast<long long>(first_k_tile + k_tile) * row_tiles + row_tile) * kTileBytes;
        const uint4 vector = ld_global_nc_v4(tile + unit * kRows * 16 + row * 16);
        const Value* values = reinterpret_cast<const Value*>(&vector);
        const Word metadata = metadata_of(tile, row, unit);
        const int window = (k_tile * kUnits + unit) * (kUnitValues / 2);
        int in_group = window % windows, column = row * pitch + window / windows * 2 * group_pairs + 2 * in_group;
#pragma unroll
        for (int j = 0; j < kUnitValues; ++j) {
            const Value value = values[j];
            if (value) rows[column + (metadata >> 2 * j & 3)] = value;
            if (j % 2) {
                column += 2;
                if (++in_group == windows) in_group = 0, column += 2;
            }
        }
    }
    __syncthreads();
    const int first_row = row_tile * kRows, first_column = blockIdx.x * columns, units = columns / (16 / WIDTH);
    const bool aligned = k % (16 / WIDTH) == 0 && columns % (16 / WIDTH) == 0;
    if (aligned) {
        for (int i = threadIdx.x; i < kRows * units; i += blockDim.x) {
            const int row = i / units, column = i % units * (16 / WIDTH);
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
