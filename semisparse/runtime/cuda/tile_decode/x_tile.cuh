// Tiles of x for decode.cuh in shared memory: TILE_M tokens by 256 columns, in 16-byte units, of which a lane reads two k-steps.

#pragma once

#include "expand_gemm/tile_shape.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "rows.cuh"

constexpr int kUnit = 8;                        // values of x in 16 bytes: two k-steps of a lane
constexpr int kTokenBytes = kTileColumns * 2;   // per token of an x tile
constexpr int kTokenGroups = (TILE_M + 7) / 8;  // mma operands of 8 tokens

// The swizzle of an x tile: XORed to the address of a lane's block, so that the 16-byte units that a quarter-warp reads (of
// four blocks, for two tokens) fall into different banks.
__device__ __forceinline__ int swizzle(int block, int token) { return (block + token % 2 * 4) * 16; }

// Copies tiles of x to shared memory.
struct XLoader {
    const SCALAR* x;  // [m, k]
    Rows rows;
    int m, k;
    bool aligned;     // whether every row of x begins at a multiple of 16 bytes

    // Copies a column tile of every WARPS_N-th token from `first` on, 16 bytes per lane; columns from k on become zeros.
    __device__ __forceinline__ void copy(Word to, int column_tile, int first, int lane) const {
        const int column = column_tile * kTileColumns + lane * kUnit;
        const int left = min(max(k - column, 0), kUnit);
        const SCALAR* row_0 = x + (left ? column : 0);
        const SCALAR* from = row_0 + static_cast<long long>(first) * k;
        if (aligned) {
#pragma unroll
            for (int i = 0; i < TILE_M; i += WARPS_N, from += WARPS_N * static_cast<long long>(k))
                if (first + i < m) cp_async_16(unit_address(to, first + i, lane), row_of(row_0, from, first + i), left * 2);
            return;
        }
#pragma unroll 1
        for (int token = first; token < m; token += WARPS_N, from += WARPS_N * static_cast<long long>(k))
            copy_values(unit_address(to, token, lane),
                        reinterpret_cast<const unsigned short*>(row_of(row_0, from, token)), left);
    }

    // Where this lane's columns of a token's x begin: at `next`, which the caller advances, or with EXPERTS in the row of x that
    // `rows` names. `row_0` is their place in row 0.
    __device__ __forceinline__ const SCALAR* row_of(const SCALAR* row_0, const SCALAR* next, int token) const {
        return EXPERTS ? row_0 + rows.x(token) * k : next;
    }

    static __device__ __forceinline__ Word unit_address(Word tile, int token, int lane) {
        return tile + token * kTokenBytes + (lane * 16 ^ swizzle(lane / 8, token));
    }

    static __device__ __forceinline__ void copy_values(Word to, const unsigned short* from, int left) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const unsigned short value = i < left ? *const_cast<const volatile unsigned short*>(from + i) : 0;
            st_shared_u16(to + 2 * i, value);
        }
    }
};

// Copies all column tiles of x, in units of 16 bytes, by all threads. Needs k in multiples of 8 and rows of x at multiples of
// 16 bytes. Units from column k on become zeros.
__device__ __forceinline__ void copy_all_x(const XLoader& loader, Word x_tiles, int m, int column_tiles) {
    for (int i = threadIdx.x; i < column_tiles * kWarpSize; i += WARPS_N * WARPS_K * kWarpSize) {
        const bool within = i * kUnit < loader.k;
        for (int token = 0; token < m; ++token)
            cp_async_16(XLoader::unit_address(x_tiles + i / kWarpSize * m * kTokenBytes, token, i % kWarpSize),
                        loader.x + loader.rows.x(token) * loader.k + (within ? i * kUnit : 0), within ? 16 : 0);
    }
}

// For lane 4 g + t: the addresses of the first 16 bytes of block t, for tokens g, g + 8 ... of an x tile. Tokens from m on repeat
// the last one; their accumulators are not stored.
struct XFragments {
    Word blocks[kTokenGroups];

    __device__ __forceinline__ XFragments(Word tile, int m, int lane) {
#pragma unroll
        for (int i = 0; i < kTokenGroups; ++i) {
            const int token = min(lane / 4 + 8 * i, m - 1);
            blocks[i] = tile + token * kTokenBytes + lane % 4 * kBlockColumns * 2 + swizzle(lane % 4, token);
        }
    }
};
