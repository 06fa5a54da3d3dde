// Loads a warp's part of the weight, ROW_TILES row tiles by a range of k-tiles, from global memory to registers.
//
// A header is a chunk's mask and start. A window is 32 headers of a row tile, in the order of the warp's chunks. Each lane
// copies one of them to shared memory, one window ahead, and reads all of them. A lane finds its two groups by counting the
// mask bits that are set below its own bit.
//
//   A warp's headers: [ROW_TILES, 2 windows * 32] | mask of rows 0 to 7 | of rows 8 to 15 | start | unused |

#pragma once

#include "gemm_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"
#include "warp.cuh"

constexpr int kWindow = 32;  // headers
constexpr int kTilesPerWindow = kWindow / kChunksPerTile;
constexpr int kHeaderBytes = 16;
constexpr int kWarpHeaderBytes = ROW_TILES * 2 * kWindow * kHeaderBytes;
static_assert(STAGES <= kTilesPerWindow, "a window arrives with x, STAGES iterations after its copies are issued");

struct Weight {
    const uint2* masks;  // [row tiles, chunks], low word first
    const Word* starts;  // [row tiles * chunks + 1]
    const char* codes;   // [kept, kGroupBytes]
    const char* scale;   // [kept], an Element each
    const char* zero;    // [kept]
    int row_tiles, chunks;  // chunks per row tile
};

// Loads a slice's codes. Their address is a multiple of the largest power of two that divides kSliceBytes.
__device__ __forceinline__ void load_codes(Word (&codes)[kSliceWords], const char* from) {
    if constexpr (kSliceBytes == 16) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        codes[0] = all.x, codes[1] = all.y, codes[2] = all.z, codes[3] = all.w;
    } else if constexpr (kSliceBytes == 8) {
        const uint2 both = *reinterpret_cast<const uint2*>(from);
        codes[0] = both.x, codes[1] = both.y;
    } else if constexpr (kSliceBytes % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kSliceWords; ++i) codes[i] = reinterpret_cast<const Word*>(from)[i];
    } else if constexpr (kSliceBytes % 2 == 0) {
        const unsigned short* halves = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
        for (int i = 0; i < kSliceBytes / 2; ++i) {
            if (i % 2 == 0) codes[i / 2] = halves[i];
            else codes[i / 2] |= static_cast<Word>(halves[i]) << 16;
        }
    } else {
        const unsigned char* octets = reinterpret_cast<const unsigned char*>(from);
        codes[0] = octets[0] | octets[1] << 8 | octets[2] << 16;
    }
}

struct WeightStream {
    const Weight& weight;
    int row_tile, first, end;  // the warp's first row tile; its k-tiles `first` to `end`
    Word headers;               // address in shared memory of the warp's headers
    Word groups[ROW_TILES][2];  // the lane's groups of the chunk that is being loaded
    bool kept[ROW_TILES][2];

    __device__ __forceinline__ WeightStream(const Weight& weight, Word headers, int row_tile, int first, int end)
        : weight(weight), row_tile(row_tile), first(first), end(end), headers(headers) {}

    __device__ __forceinline__ bool has(int i) const { return row_tile + i < weight.row_tiles && first < end; }
    __device__ __forceinline__ int chunk_of(int tile) const { return tile / kTilesPerChunk * kChunksPerTile; }
    __device__ __forceinline__ Word header(int i, int position) const {
        return headers + (i * 2 * kWindow + position % (2 * kWindow)) * kHeaderBytes;
    }

    // Copies the headers of a window of the range, one per lane, as part of the next cp.async group. Headers past the range or
    // the weight keep no group.
    __device__ __forceinline__ void copy_headers(int window) const {
        const int position = window * kWindow + static_cast<int>(threadIdx.x % 32);
        const int tile = first + position / kChunksPerTile, chunk = chunk_of(tile) + position % kChunksPerTile;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            const long long from = static_cast<long long>(row_tile + i) * weight.chunks + chunk;
            if (has(i) && tile < end && chunk < weight.chunks) {
                cp_async<8>(header(i, position), weight.masks + from);
                cp_async<4>(header(i, position) + 8, weight.starts + from);
            } else {
                st_shared_v4(header(i, position), uint4{0, 0, 0, 0});
            }
        }
    }

    // Finds the lane's groups of the chunk of slice `slice` of the range's k-tile `tile`.
    __device__ __forceinline__ void find_chunk(int tile, int slice) {
        if (slice == 0 && tile > 0 && tile % kTilesPerWindow == 0) {
            __syncwarp();  // all lanes have read the window that is overwritten
            copy_headers(tile / kTilesPerWindow + 1);
        }
        const int position = tile * kChunksPerTile + slice / kSlicesPerChunk;
        const Word below = (1u << threadIdx.x % 32) - 1;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            Word words[4];
            ld_shared_ordered(words, header(i, position));
            const Word low = words[0], high = words[1], start = words[2];
            groups[i][0] = start + __popc(low & below);
            groups[i][1] = start + __popc(low) + __popc(high & below);
            kept[i][0] = low & below + 1;
            kept[i][1] = high & below + 1;
        }
    }

    // Loads a slice of the range's k-tile `tile`. Slices must be loaded in their order.
    __device__ __forceinline__ void load(Slice (&slices)[ROW_TILES], int tile, int slice) {
        if (slice % kSlicesPerChunk == 0) find_chunk(tile, slice);
        const int part = kTilesPerChunk > 1 ? (first + tile) % kTilesPerChunk * (K_TILE * BITS / 8) : 0;
        const int offset = part + slice % kSlicesPerChunk * kSliceBytes;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const Word group = groups[i][row];
                slices[i].scale[row] = 0;
                if (kept[i][row]) {
                    load_codes(slices[i].codes[row], weight.codes + static_cast<size_t>(group) * kGroupBytes + offset);
                    slices[i].scale[row] = reinterpret_cast<const unsigned short*>(weight.scale)[group];
                    slices[i].zero[row] = reinterpret_cast<const unsigned char*>(weight.zero)[group];
                }
            }
        }
    }
};
