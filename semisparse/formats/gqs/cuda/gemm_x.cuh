// x in shared memory: STAGES stages, each with a k-tile of TILE_M tokens for every warp_k (a warp's index along K).
//
//   stage | warp_k 0: token 0 | unit 0: g0 g1 g2 g3 | unit 1: g0 g1 g2 g3 | ... | 64 bytes unused |
//         |           token 1 | ...                                                               |
//         | warp_k 1: ...
//
// A cell is a unit (gemm_tile.cuh) of one group: 8 columns, 16 bytes. Of a unit the four lanes g of a token load 64 contiguous
// bytes, and the pitch of tokens is an odd multiple of 64 bytes: neither ld.shared.v4 nor the copy has bank conflicts. Consecutive
// threads copy the cells of a token in their order in shared memory; these are one contiguous range of x, or a range per group if
// groups are longer than a k-tile.

#pragma once

#include "gemm_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"

constexpr int kCells = kGroups * K_TILE / kUnit;  // per token
constexpr int kTokenBytes = 16 * kCells + 64;
constexpr int kKTileBytes = TILE_M * kTokenBytes;
constexpr int kStageBytes = WARPS_K * kKTileBytes;
constexpr int kUnitsPerGroup = least(GROUP_SIZE, K_TILE) / kUnit;  // in a k-tile
constexpr int kCopyUnroll = ALIGNED_K ? 4 : 1;
constexpr int kCopied = kThreads / kCells;  // tokens that the CTA copies at once
static_assert(kThreads % kCells == 0, "a thread copies the same columns of each k-tile");

struct ActivationStages {
    const unsigned short* x;  // [m, k]
    Word smem;
    int m, k, first_token;
    int first, end, per_warp;  // k-tiles of the CTA: warp_k i has `per_warp` of them from first + i * per_warp on
    int cell, column;          // the cell that the thread copies of each token, and the cell's first column in the k-tile

    __device__ __forceinline__ ActivationStages(const Element* x, Word smem, int m, int k, int first_token, int first, int end,
                                                int per_warp)
        : x(reinterpret_cast<const unsigned short*>(x)), smem(smem), m(m), k(k), first_token(first_token), first(first),
          end(end), per_warp(per_warp), cell(threadIdx.x % kCells) {
        const int unit = cell / kGroups;
        column = unit / kUnitsPerGroup * (kGroups * GROUP_SIZE) + cell % kGroups * GROUP_SIZE + unit % kUnitsPerGroup * kUnit;
    }

    // Copies x for iteration `i` of all warps as one cp.async group; zeros past K, past a warp's range and past the last token.
    // (Repeating the last token instead made all CTAs read the same lines of x: one token took 117 us, eight 88, for W4S50 at
    // 28672 x 8192.)
    __device__ __forceinline__ void issue(int i) const {
        Word to = smem + i % STAGES * kStageBytes + threadIdx.x / kCells * kTokenBytes + 16 * cell;
#pragma unroll
        for (int warp_k = 0; warp_k < WARPS_K; ++warp_k, to += kKTileBytes) {
            const int tile = first + warp_k * per_warp + i, from = column_of(tile) + column;
            const int left = i < per_warp && tile < end ? k - from : 0;
            const char* source = reinterpret_cast<const char*>(x + (left > 0 ? from : 0));
#pragma unroll kCopyUnroll
            for (int row = 0; row < TILE_M; row += kCopied) {
                const int token = row + threadIdx.x / kCells;
                if (TILE_M % kCopied && token >= TILE_M) continue;
                const int from_token = min(first_token + token, m - 1);
                copy(to + row * kTokenBytes, mad_wide(from_token, 2 * k, source), first_token + token < m ? left : 0);
            }
        }
        cp_async_commit_group();
    }

    // Copies the first `left` columns of a cell, and zeros for the others.
    __device__ __forceinline__ void copy(Word to, const char* source, int left) const {
        if constexpr (ALIGNED_K) {
            cp_async_16(to, source, left > 0 ? 16 : 0);
        } else {
            const unsigned short* from = reinterpret_cast<const unsigned short*>(source);
            Word words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                if (i < left) words[i / 2] |= static_cast<Word>(from[i]) << 16 * (i % 2);
            }
            st_shared_v4(to, words);
        }
    }
};
