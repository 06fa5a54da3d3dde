// x in shared memory, in one of two ways.
//
// StagedX: a slot has a k-tile of TILE_M tokens for every warp_k, copied by cp.async.
// WholeX, with X_TOKENS: all of x is copied before the main loop, so the loop needs no barrier; stage_x.cuh normalises it on its
// way. A k-tile has X_TOKENS tokens. Lanes of tokens beyond these read zeros.
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
#include "stage_x.cuh"
#include "warp.cuh"

constexpr int kCells = kKTile / kUnitColumns;  // of a token in a k-tile
constexpr int kTokenBytes = 16 * kCells;
constexpr int kXTileBytes = TILE_M * kTokenBytes;
constexpr int kXSlotBytes = WARPS_K * kXTileBytes;  // of an iteration

constexpr int kXCells = WARPS_K * TILE_M * kCells;  // copied per iteration, each by one thread
constexpr int kRowsCopied = kThreads / kCells;       // tokens, of any of the k-tiles, that the CTA copies at once

// Offset of a lane's cell of a unit in the 256 bytes of a token.
__device__ __forceinline__ Word cell_at(Word unit, Word token, Word lane) { return ((unit ^ token % 2) * 4 + lane) * 16; }

// The address of a lane's cells of even and of odd units; `at` is that of its token.
struct LaneCells {
    Word even, odd;

    __device__ __forceinline__ LaneCells(Word at, int lane)
        : even(keep_in_register(at + cell_at(0, lane / 4, lane % 4))), odd(keep_in_register(at + cell_at(1, lane / 4, lane % 4))) {}

    // Loads the lane's 8 columns of a unit, B of two k-steps.
    __device__ __forceinline__ void load(Word (&words)[4], Word offset, int unit) const {
        ld_shared_ordered(words, (unit % 2 ? odd : even) + offset + unit / 2 * 128);
    }
};

struct StagedX {
    const char* x;       // [m, k], at the thread's column of k-tile 0
    Word to;             // address of the thread's cell in slot 0
    int column, k;       // the thread's column in a k-tile
    int first_token, m, row_bytes;
    LaneCells cells;     // of token lane / 4 of the warp's k-tile

    __device__ __forceinline__ StagedX(const Element* all, Word smem, int first_token, int m, int k, int warp_k, int lane)
        : k(k), first_token(first_token), m(m), row_bytes(2 * k),
          cells(smem + warp_k * kXTileBytes + lane / 4 * kTokenBytes, lane) {
        const Word cell = threadIdx.x % kCells, row = threadIdx.x / kCells, unit = cell / 4;
        column = keep_in_register(unit / kUnitsPerSegment * (4 * kPiece) + cell % 4 * kPiece + unit % kUnitsPerSegment * kUnitColumns);
        x = reinterpret_cast<const char*>(all + column);
        // All tokens that a thread copies are even, or all are odd: kRowsCopied is even.
        to = keep_in_register(smem + row * kTokenBytes + cell_at(unit, row, cell % 4));
    }

    // Copies x for iteration `iteration`, the k-tiles of all warp_k; zeros past the last token and past column k.
    __device__ __forceinline__ void copy(Word slot, int iteration) const {
#pragma unroll
        for (int begin = 0; begin < kXCells; begin += kThreads) {
            const int row = begin / kCells + threadIdx.x / kCells;
            if (kXCells % kThreads && row >= WARPS_K * TILE_M) continue;
            const int token = first_token + (WARPS_K > 1 ? row % TILE_M : row);
            const int first = (iteration * WARPS_K + (WARPS_K > 1 ? row / TILE_M : 0)) * kKTile;
            const bool exists = token < m && first + column < k;
            const char* from = mad_wide(exists ? 2 * first : 0, 1, mad_wide(exists ? token : 0, row_bytes, x));
            cp_async_16(to + slot + begin * 16, exists ? from : x - 2 * column, exists ? 16 : 0);
        }
    }

    // Offset of the k-tile for `load`.
    __device__ __forceinline__ Word offset_of(Word slot, int) const { return slot; }

    // Loads the lane's 8 columns of a unit for token lane / 4 of each 8.
    __device__ __forceinline__ void load(Word (&words)[4], Word offset, int unit, int token_tile) const {
        cells.load(words, offset + token_tile * (8 * kTokenBytes), unit);
    }
};
static_assert(kThreads % (2 * kCells) == 0, "tokens of a thread have one parity");
static_assert(TILE_M % 2 == 0, "those of another k-tile, too");

struct WholeX {
    static constexpr int kTokens = X_TOKENS ? X_TOKENS : 1;
    static constexpr int kTileBytes = kTokens * kTokenBytes;

    Word to;         // address of k-tile 0
    Word tile_bytes;  // from a lane's k-tile to the next; 0 for the lanes that read zeros
    LaneCells cells;

    // x begins at `smem` with kTokenBytes of zeros.
    __device__ __forceinline__ WholeX(Word smem, int lane)
        : to(smem + kTokenBytes), tile_bytes(keep_in_register(lane / 4 < kTokens ? kTileBytes : 0)),
          cells(lane / 4 < kTokens ? to + lane / 4 * kTokenBytes : smem, lane) {}

    __device__ __forceinline__ Word address_of(Word token, Word cell) const {
        const Word column = cell % kCells * kUnitColumns, within = column % (4 * kPiece);
        const Word unit = column / (4 * kPiece) * kUnitsPerSegment + within % kPiece / kUnitColumns;
        return to + cell / kCells * kTileBytes + token * kTokenBytes + cell_at(unit, token, within / kPiece);
    }

    // Copies x, zeros past column k and past the last token. Ends with a barrier.
    template <typename Stage>
    __device__ __forceinline__ void copy(const Stage& stage, const SCALAR* x, int m, int k_tiles, float epsilon) const {
        const uint4 zeros{0, 0, 0, 0};
        if (threadIdx.x < kCells) st_shared_v4(to - kTokenBytes + 16 * threadIdx.x, zeros);
        for (int i = threadIdx.x; i < (kTokens - m) * k_tiles * kCells; i += kThreads)
            st_shared_v4(address_of(m + i / kCells / k_tiles, i % (k_tiles * kCells)), zeros);
        stage.copy(x, {}, k_tiles * kCells, epsilon, [&](int token, int unit) { return address_of(token, unit); });
    }

    __device__ __forceinline__ Word offset_of(Word, int k_tile) const { return k_tile * tile_bytes; }

    __device__ __forceinline__ void load(Word (&words)[4], Word offset, int unit, int) const { cells.load(words, offset, unit); }
};
static_assert(!X_TOKENS || TILE_M == 8, "mma takes 8 tokens");

template <bool staged, typename Staged, typename Whole> struct Choose { using Type = Staged; };
template <typename Staged, typename Whole> struct Choose<false, Staged, Whole> { using Type = Whole; };
using X = Choose<X_TOKENS == 0, StagedX, WholeX>::Type;
