// Mask tiles (README.md has the figure) from a dense weight of 16 bits: what a weight goes through on its way to a GPU.
//
// Grid: 1-D, warps stride over the tiles. CTA: 8 warps, each with a tile at a time: lane 4 g + t reads its 64 columns of rows g and
// g + 8. Launched twice: first without `starts`, which writes the words per lane that each tile needs, then with them, which
// writes masks and values. `tiles` holds zeros before, as lanes with fewer values than the longest leave theirs.
// Shared memory: none.
//
// Bound by the stores of values, which are 4 bytes to a line of their own per lane; not timed apart from the conversion.

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kTileRows = 16, kTileColumns = 256, kBlock = 64;  // a lane has kBlock columns of a row
constexpr int kMaskUnits = 4;                                   // units of kWarp words of masks, before the values
constexpr int kVector = 8;                                      // values per load

// The values that a lane has found so far, two per word.
struct Writer {
    Word* to;       // the lane's word 0, null to count only
    int count = 0;
    Word pending = 0;

    __device__ __forceinline__ void put(Word value) {
        pending = count % 2 ? pending | value << 16 : value;
        if (to) to[count / 2 * kWarp] = pending;
        ++count;
    }
};

// Reads a lane's columns of a row, from `column` on; those from `pitch` on are zeros. Returns the two words of its mask.
__device__ __forceinline__ uint2 read_row(const unsigned short* row, int column, int pitch, bool exists, Writer& writer) {
    Word mask[2] = {};
#pragma unroll
    for (int first = 0; first < kBlock; first += kVector) {
        uint4 loaded = {};
        if (exists && column + first < pitch) loaded = *reinterpret_cast<const uint4*>(row + column + first);
        const Word words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const int place = (first + i + 1) % kBlock, bit = place % 4 * 8 + 7 - place % 32 / 4;
            const Word value = words[i / 2] >> i % 2 * 16 & 0xffffu;
            if (value & 0x7fffu) {  // zeros of either sign are not stored
                mask[place / 32] |= 1u << bit;
                writer.put(value);
            }
        }
    }
    return {mask[0], mask[1]};
}

extern "C" __global__ void __launch_bounds__(kWarps * kWarp) semisparse_ec_csr_pack_tiles(
    const unsigned short* weight,  // [n, pitch], pitch a multiple of 8, zeros from column k on
    const int* starts,             // [tile_count + 1], in units; null in the first launch
    int* words,                    // [tile_count], written by the first launch
    Word* tiles,                   // [units, 32], written by the second
    int n, int pitch, int column_tiles, int tile_count
) {
    const int lane = threadIdx.x % kWarp;
    for (int tile = blockIdx.x * kWarps + threadIdx.x / kWarp; tile < tile_count; tile += gridDim.x * kWarps) {
        const int row = tile / column_tiles * kTileRows + lane / 4;
        const int column = tile % column_tiles * kTileColumns + lane % 4 * kBlock;
        Word* to = starts ? tiles + static_cast<long long>(starts[tile]) * kWarp : nullptr;
        Writer writer{to ? to + kMaskUnits * kWarp + lane : nullptr};
        const unsigned short* upper_row = weight + static_cast<long long>(row) * pitch;
        const uint2 upper = read_row(upper_row, column, pitch, row < n, writer);
        const uint2 lower = read_row(upper_row + 8ll * pitch, column, pitch, row + 8 < n, writer);
        if (to) {
            reinterpret_cast<uint4*>(to)[lane] = uint4{upper.x, upper.y, lower.x, lower.y};
        } else {
            const int longest = __reduce_max_sync(0xffffffffu, writer.count);
            if (lane == 0) words[tile] = (longest + 1) / 2;
        }
    }
}
