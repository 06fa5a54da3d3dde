// x in shared memory: per stage and warp_k a k-tile of TILE_M tokens.
//
//   token 0: | unit 0: t0 t1 t2 t3 | unit 1: t0 t1 t2 t3 | unit 2 | unit 3 |     256 bytes; a cell is a lane's 8 columns of a unit
//   token 1: | unit 1              | unit 0              | unit 3 | unit 2 |
//   token 2: as token 0, ...
//
// The four lanes t of a token load 64 contiguous bytes of a unit. Odd tokens have units exchanged in pairs, so that the lanes of two
// tokens load from all banks.

#pragma once

#include "full_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"

constexpr int kCells = kKTile / kUnitColumns;  // of a token in a k-tile
constexpr int kTokenBytes = 16 * kCells;
constexpr int kXTileBytes = TILE_M * kTokenBytes;
constexpr int kXStageBytes = WARPS_K * kXTileBytes;

constexpr int kXCells = WARPS_K * TILE_M * kCells;  // copied per iteration, each by one thread
constexpr int kRowsCopied = kThreads / kCells;       // of all k-tiles, at once

// Copies x, and reads it.
struct XStages {
    const char* x;       // [m, k], at the thread's column of k-tile 0
    Word to;             // of the thread's cell in a stage
    int column, k;       // the thread's column in a k-tile
    int first_token, m, row_bytes;
    Word even, odd;      // address of the lane's cells of even and of odd units in a stage, of the warp's k-tile

    __device__ __forceinline__ XStages(const Element* all, Word smem, int first_token, int m, int k, int warp_k, int lane)
        : k(k), first_token(first_token), m(m), row_bytes(2 * k) {
        const Word cell = threadIdx.x % kCells, row = threadIdx.x / kCells, unit = cell / 4, own = lane / 4 % 2 * 64;
        column = keep_in_register(unit / kUnitsPerSegment * (4 * kPiece) + cell % 4 * kPiece + unit % kUnitsPerSegment * kUnitColumns);
        x = reinterpret_cast<const char*>(all + column);
        // Tokens of a thread have one parity: kRowsCopied is even.
        to = keep_in_register(smem + row * kTokenBytes + ((unit ^ row % 2) * 4 + cell % 4) * 16);
        const Word lane_x = smem + warp_k * kXTileBytes + lane / 4 * kTokenBytes + lane % 4 * 16;
        even = keep_in_register(lane_x + own), odd = keep_in_register(lane_x + (64 - own));
    }

    // Copies x for iteration `iteration`, the k-tiles of all warp_k; zeros past the last token and past column k.
    __device__ __forceinline__ void copy(Word stage, int iteration) const {
#pragma unroll
        for (int begin = 0; begin < kXCells; begin += kThreads) {
            const int row = begin / kCells + threadIdx.x / kCells;
            if (kXCells % kThreads && row >= WARPS_K * TILE_M) continue;
            const int token = first_token + (WARPS_K > 1 ? row % TILE_M : row);
            const int first = (iteration * WARPS_K + (WARPS_K > 1 ? row / TILE_M : 0)) * kKTile;
            const bool exists = token < m && first + column < k;
            const char* from = mad_wide(exists ? 2 * first : 0, 1, mad_wide(exists ? token : 0, row_bytes, x));
            cp_async_16(to + stage + begin * 16, exists ? from : x - 2 * column, exists ? 16 : 0);
        }
    }

    // Loads a lane's 8 columns of a unit for token lane / 4 of each 8: B of two k-steps.
    __device__ __forceinline__ void load(Word (&words)[4], Word stage, int unit, int token_tile) const {
        ld_shared_ordered(words, (unit % 2 ? odd : even) + stage + unit / 2 * 128 + token_tile * (8 * kTokenBytes));
    }
};
static_assert(kThreads % (2 * kCells) == 0, "tokens of a thread have one parity");
static_assert(TILE_M % 2 == 0, "those of another k-tile, too");
