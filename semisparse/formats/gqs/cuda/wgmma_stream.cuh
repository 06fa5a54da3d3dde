// How a consumer warp of gemm_wgmma.cu copies its tiles of a gqs weight to shared memory, by cp.async, STAGES tiles ahead.
//
// A tile's groups are neighbours in global memory; how many there are, its headers say. kWindow headers, in the order in which the
// warp meets their chunks, are a window: two of them are in shared memory, and a window is copied when the last but one before it
// has been expanded.

#pragma once

#include "expand_gemm/gemm.cuh"
#include "ptx/cp_async.cuh"
#include "warp.cuh"
#include "wgmma_tile.cuh"

constexpr int kWindow = kChunks > 4 ? 64 : 32;
constexpr int kTilesPerWindow = kWindow / kChunks;
constexpr int kWarpHeaderBytes = 2 * kWindow * kHeaderBytes;
static_assert(kTilesPerWindow >= 2 * STAGES - 1, "a window has arrived before its first tile is copied");

// A gqs weight.
struct Groups {
    static constexpr int kTileBytes = kGqsTileBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kWarpHeaderBytes;
    static constexpr bool kBulk = false;
    using Stream = struct GroupStream;

    const uint2* masks;     // [row tiles, chunks], low word first
    const Word* starts;     // [row tiles * chunks + 1]
    const char* codes;      // [kept, kGroupBytes]
    const char* scale;      // [kept], an Element each
    const char* zero;       // [kept]
    int row_tiles, chunks;  // chunks per row tile
};

// Copies the bytes `begin` to `end` of a tensor of `size` bytes to where they lie modulo 16.
__device__ __forceinline__ void copy_range(Word to, const char* from, long long begin, int bytes, long long size, int lane) {
    const int skew = static_cast<int>(begin & 15);
    const char* source = from + begin - skew;
    const long long left = size - begin + skew;
#pragma unroll 1
    for (int at = lane * 16; at < bytes + skew; at += kWarpSize * 16)
        cp_async_16(to + at, source + at, static_cast<int>(min(static_cast<long long>(16), left - at)));
}

struct GroupStream {
    const Groups& weight;
    WorkRanges work;
    int first, last;  // iterations
    int warp, lane;
    Word tiles, headers;
    Word code_mask;   // in a register: an instruction takes only one constant
    long long kept;   // groups of the weight
    int stage = 0;    // of the current tile, which is the next to be copied to

    __device__ __forceinline__ GroupStream(const Groups& weight, StreamMemory memory, WorkRanges work, int first, int last,
                                           int warp, int lane)
        : weight(weight), work(work), first(first), last(last), warp(warp), lane(lane), tiles(memory.tiles),
          headers(memory.extra + warp * kWarpHeaderBytes), code_mask(keep_constant(::code_mask(kElement), weight.row_tiles)),
          kept(weight.starts[static_cast<long long>(weight.row_tiles) * weight.chunks]) {
        copy_headers(0);
        copy_headers(1);
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) copy(first + i, tiles + i * kConsumerWarps * kGqsTileBytes);
    }

    __device__ __forceinline__ TileExpander acquire(int iteration) {
        cp_async_wait_group<STAGES - 1>();
        __syncwarp();
        return TileExpander(tiles + stage * kConsumerWarps * kGqsTileBytes, header_at(iteration), 1u << lane, part_of(iteration),
                            code_mask);
    }

    __device__ __forceinline__ void release(int iteration) {
        __syncwarp();  // all lanes have read the tile, and a window's last headers
        const int done = iteration + 1 - first;
        if (done % kTilesPerWindow == 0) copy_headers(done / kTilesPerWindow + 1);
        copy(iteration + STAGES, tiles + stage * kConsumerWarps * kGqsTileBytes);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

  private:
    __device__ __forceinline__ Word header_at(int iteration) const {
        return headers + (iteration - first) % (2 * kTilesPerWindow) * (kChunks * kHeaderBytes);
    }

    __device__ __forceinline__ int part_of(int iteration) const {
        if constexpr (kParts > 1) return work.column(iteration) % kParts;
        return 0;
    }

    // Copies a window of headers. Past the weight's last chunk no group is kept; rows past the last tile repeat it.
    __device__ __forceinline__ void copy_headers(int window) const {
#pragma unroll 1
        for (int i = lane; i < kWindow; i += kWarpSize) {
            const int position = window * kWindow + i, iteration = first + position / kChunks;
            const Word to = headers + position % (2 * kWindow) * kHeaderBytes;
            if (iteration >= last) continue;
            const int row_tile = min(work.row_tile(work.tile(iteration)) + warp, weight.row_tiles - 1);
            const int chunk = work.column(iteration) / kParts * kChunks + position % kChunks;
            const long long at = static_cast<long long>(row_tile) * weight.chunks + min(chunk, weight.chunks);
            cp_async<4>(to + 8, weight.starts + at);
            if (chunk < weight.chunks) {
                cp_async<8>(to, weight.masks + at);
                cp_async<4>(to + 12, weight.starts + at + 1);
            } else {
                st_shared(to, 0), st_shared(to + 4, 0);
                cp_async<4>(to + 12, weight.starts + at);
            }
        }
    }

    // Copies the groups of a tile, as one cp.async group.
    __device__ __forceinline__ void copy(int iteration, Word to) const {
        if (iteration < last) {
            const Word header = header_at(iteration);
            const Word begin = ld_shared_ordered(header + 8);
            const int count = static_cast<int>(ld_shared_ordered(header + (kChunks - 1) * kHeaderBytes + 12) - begin);
            if constexpr (kPieces > 0) {
                constexpr int kPerGroup = kPieces ? kPieces : 1;
                const char* from = weight.codes + static_cast<long long>(begin) * kGroupBytes + part_of(iteration) * (kPerGroup * 16);
#pragma unroll 1
                for (int piece = lane; piece < count * kPerGroup; piece += kWarpSize)
                    cp_async_16(to + swizzled_piece(piece) * 16, from + piece / kPerGroup * kGroupBytes + piece % kPerGroup * 16);
            } else {
                copy_range(to, weight.codes, static_cast<long long>(begin) * kGroupBytes, count * kGroupBytes,
                           kept * kGroupBytes, lane);
            }
            copy_range(to + kCodesBytes, weight.scale, 2ll * begin, 2 * count, 2 * kept, lane);
            copy_range(to + kCodesBytes + kScaleBytes, weight.zero, begin, count, kept, lane);
        }
        cp_async_commit_group();
    }
};
