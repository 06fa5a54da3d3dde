// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a dense 16-bit weight and 1 to 8 N8_TILES tokens: a GEMV on tensor cores.
//
// Grid: 1-D, persistent CTAs that stride over row tiles of 16 rows. CTA: WARPS warps, which split K among them (sliced-K).
// Shared memory: partial accumulators [2, WARPS, 16 rows, tokens] float32; row tiles alternate between the two halves.
//
// A warp's step is 64 columns of 16 rows. Lane 4 * g + t loads the columns 16 t to 16 t + 15 of rows g and g + 8 straight into
// registers, and the same columns of token g of x: any order of the columns will do for a dot product, as long as both operands
// have the same. So no weight passes through shared memory. STEPS steps are in flight: the loads of a step replace those of the
// step that was just multiplied, across row tiles.
//
// Programmatic dependent launch: nothing is read before griddepcontrol.wait. Bound by memory.
// Accumulators are float32 and added in a fixed order: every run returns the same bits.
//
// Compiled for SCALAR (__half or __nv_bfloat16), N8_TILES (of 8 tokens), WARPS, STEPS and CTAS_PER_SM.

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kTileRows = 16;
constexpr int kStepColumns = 64;
constexpr int kLaneColumns = 16;  // of a step, in two loads of 16 bytes
constexpr int kTokens = 8 * N8_TILES;

struct Weights {
    const SCALAR* w;
    int n, k;
};

// What a lane holds of a step: rows g and g + 8 of the weight, and token g of each 8 of x.
struct Step {
    uint4 upper[2], lower[2], x[N8_TILES][2];

    static __device__ __forceinline__ uint4 load_weight(const SCALAR* from, bool inside) {
        return inside ? ld_global_nc_v4(from) : uint4{0, 0, 0, 0};
    }

    // `column` is the lane's first; columns from k on are zeros. Rows from n on repeat the last one: nobody stores their sums.
    __device__ __forceinline__ void load(const Weights& weights, const SCALAR* x_rows, int m, int first_row, int column) {
        const int g = threadIdx.x % kWarp / 4;
        const SCALAR* above = weights.w + static_cast<long long>(min(first_row + g, weights.n - 1)) * weights.k + column;
        const SCALAR* below = weights.w + static_cast<long long>(min(first_row + g + 8, weights.n - 1)) * weights.k + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool inside = column + 8 * half < weights.k;
            upper[half] = load_weight(above + 8 * half, inside);
            lower[half] = load_weight(below + 8 * half, inside);
#pragma unroll
            for (int tile = 0; tile < N8_TILES; ++tile) {
                const int token = g + 8 * tile;
                const SCALAR* from = x_rows + static_cast<long long>(token) * weights.k + column + 8 * half;
                x[tile][half] = inside && token < m ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sums)[N8_TILES][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word first[4] = {upper[half].x, lower[half].x, upper[half].y, lower[half].y};
            const Word second[4] = {upper[half].z, lower[half].z, upper[half].w, lower[half].w};
#pragma unroll
            for (int tile = 0; tile < N8_TILES; ++tile) {
                mma_m16n8k16(sums[tile], first, x[tile][half].x, x[tile][half].y, static_cast<const SCALAR*>(nullptr));
                mma_m16n8k16(sums[tile], second, x[tile][half].z, x[tile][half].w, static_cast<const SCALAR*>(nullptr));
            }
        }
    }
};

using Partial = float[kTokens][kTileRows];  // a warp's accumulators in shared memory

// Lane 4 * g + t holds rows g and g + 8 of tokens 2 t and 2 t + 1.
__device__ __forceinline__ void store_partial(Partial& partial, const float (&sums)[N8_TILES][4]) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 4 * N8_TILES; ++i)
        partial[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 % 2 * 8] = sums[i / 4][i % 4];
}

__device__ __forceinline__ void reduce(const Partial* partials, const SCALAR* bias, SCALAR* y, int m, int n, int first_row) {
    for (int i = threadIdx.x; i < m * kTileRows; i += WARPS * kWarp) {
        const int token = i / kTileRows, row = first_row + i % kTileRows;
        if (row >= n) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += partials[warp][token][i % kTileRows];
        store(y + static_cast<long long>(token) * n + row, sum);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * kWarp, CTAS_PER_SM) semisparse_dense_decode(
    // Not __restrict__: the compiler could move loads that it takes for constants before griddepcontrol.wait.
    const SCALAR* x,     // [m, k], aligned to 16 bytes
    const SCALAR* w,     // [n, k], aligned to 16 bytes
    const SCALAR* bias,  // [n] or null
    SCALAR* y,           // [m, n]
    int m, int n, int k,
    int steps            // of a warp per row tile, a multiple of STEPS
) {
    __shared__ Partial partials[2][WARPS];
    const int warp = threadIdx.x / kWarp, row_tiles = (n + kTileRows - 1) / kTileRows;
    const Weights weights{w, n, k};
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    const int lane_column = threadIdx.x % 4 * kLaneColumns;
    int next_tile = blockIdx.x, next_step = 0;
    auto load_next = [&](Step& step) {
        if (next_tile < row_tiles)
            step.load(weights, x, m, next_tile * kTileRows, (next_step * WARPS + warp) * kStepColumns + lane_column);
        if (++next_step == steps) next_step = 0, next_tile += gridDim.x;
    };
    Step ring[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) load_next(ring[i]);
    int parity = 0;
    for (int tile = blockIdx.x; tile < row_tiles; tile += gridDim.x, parity ^= 1) {
        float sums[N8_TILES][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; step += STEPS) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                ring[i].multiply(sums);
                load_next(ring[i]);
            }
        }
        store_partial(partials[parity][warp], sums);
        __syncthreads();
        reduce(partials[parity], bias, y, m, n, tile * kTileRows);
    }
}
