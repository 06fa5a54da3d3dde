// Sizes of full.cu: a k-tile of a row tile, in global memory and in shared memory.
//
// Nothing is dropped, so a chunk stores its 16 rows one after another, and a row its groups: the codes of consecutive columns are
// contiguous up to the end of the chunk (4 groups, or those that are left of the last chunk).
//
//   global memory:   chunk 0: | row 0: g0 g1 g2 g3 | row 1: g0 g1 g2 g3 | ... | row 15 |   chunk 1: | ...
//   a k-tile, 128 columns:    part of a chunk of groups of 64 or 128; a chunk of groups of 32; two chunks of groups of 16
//   shared memory:   | codes of row 0 | of row 1 | ... | of row 15 | scales, kScaleWords per row | zero points, kZeroWords per row |
//
// A segment is 4 kPiece columns of a k-tile. Lane 4 r + t has columns t * kPiece to (t + 1) * kPiece - 1 of each segment, in rows r
// and r + 8. A unit is 8 of a lane's columns: two k-steps of mma.m16n8k16, each with four columns of each of a row's four lanes.
// Columns may have any order in the fragments if A and B have the same.
//
// Macros: BITS (2, 3, 4 or 8), GROUP_SIZE (16 to 128; not 16 with 3 bits), MULTIPLY_CODES (groups of 64 or 128, 2 to 4 bits; not
// 64 with 3 bits).

#pragma once

#include "element.cuh"
#include "ptx/word.cuh"

constexpr int kRows = 16;            // per row tile
constexpr int kChunkGroups = 4;      // per row of a chunk
constexpr int kKTile = 128;          // columns
constexpr int kUnits = kKTile / 32;  // per k-tile
constexpr int kUnitColumns = 8;      // of a lane

constexpr int kGroupBytes = GROUP_SIZE * BITS / 8;      // bytes of a group's codes
constexpr int kRowBytes = kKTile * BITS / 8;            // bytes of a row's codes in a k-tile
constexpr int kRowCopies = kRowBytes / 16;              // of 16 bytes
constexpr int kChunkColumns = kChunkGroups * GROUP_SIZE;
constexpr int kChunksPerTile = kKTile > kChunkColumns ? kKTile / kChunkColumns : 1;
constexpr int kTilesPerChunk = kChunkColumns > kKTile ? kChunkColumns / kKTile : 1;
constexpr int kGroupsPerTile = kKTile / GROUP_SIZE;     // of a row
constexpr int kCopiesPerChunk = kRowCopies / kChunksPerTile;  // of a row
static_assert(kRowCopies % kChunksPerTile == 0, "a row of a chunk is a multiple of 16 bytes");

// Words that hold a row's scales of a k-tile, and its zero points. Where these fill less than a word, it also holds those of
// neighbouring groups.
constexpr int kScaleWords = kGroupsPerTile > 2 ? kGroupsPerTile / 2 : 1;
constexpr int kZeroWords = kGroupsPerTile > 4 ? kGroupsPerTile / 4 : 1;
constexpr int kScaleAt = kRows * kRowBytes;
constexpr int kZeroAt = kScaleAt + kRows * kScaleWords * 4;
constexpr int kRowTileBytes = kZeroAt + kRows * kZeroWords * 4;

constexpr int kPiece = MULTIPLY_CODES && GROUP_SIZE == 64 ? 16 : 32;  // columns of a lane in a segment
constexpr int kSegments = kKTile / 4 / kPiece;                         // per k-tile
constexpr int kUnitsPerSegment = kPiece / kUnitColumns;
constexpr int kPieceWords = kPiece * BITS / 32;  // of a lane's codes in a row of a segment
static_assert(kPieceWords * 32 == kPiece * BITS, "a piece fills words");
