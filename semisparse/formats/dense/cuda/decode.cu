// y[m, n] = x[m, k] @ w[n, k].T + bias[n] for a dense 16-bit weight and 1 to 8 * N8_TILES tokens: a GEMV on tensor cores.
//
// Grid: 1-D, persistent CTAs that stride over tiles of 16 rows. With SILU_MUL a tile has rows r to r + 7 of the gate projection
// and n / 2 + r to n / 2 + r + 7, of the up projection.
// CTA: WARPS warps, which split K among them (sliced-K).
// Static shared memory: partial accumulators [2, WARPS, tokens, 16 rows] float32; row tiles alternate between the two halves.
// Dynamic shared memory of a fused kernel (fusion.cuh): x [m, steps * WARPS * 64] (stage_x.cuh), 16-byte unit u of token t at
// u ^ (t % 2), which spreads the tokens of a quarter-warp over the banks.
//
// A warp's step is 64 columns of 16 rows. Lane 4 * g + t loads the columns 16 t to 16 t + 15 of rows g and g + 8 straight into
// registers, and the same columns of token g of x: a dot product may add its columns in any order that both operands share. So
// no weight passes through shared memory. STEPS steps are in flight: the loads of a step replace those of the step that was
// just multiplied, across row tiles.
//
// Programmatic dependent launch: a fused kernel loads the first steps' weights before griddepcontrol.wait; others load nothing
// before it. Bound by memory. Accumulators are float32 and added in a fixed order: every run returns the same bits.
//
// Macros: SCALAR (__half or __nv_bfloat16), N8_TILES (tiles of 8 tokens), WARPS, STEPS, CTAS_PER_SM (for registers), and those
// of fusion.cuh.

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "stage_x.cuh"

constexpr int kWarp = 32;
constexpr int kTileRows = 16;
constexpr int kStepColumns = 64;
constexpr int kLaneColumns = 16;  // of a step, in two loads of 16 bytes
constexpr int kTokens = 8 * N8_TILES;

constexpr int kOutputs = SILU_MUL ? kTileRows / 2 : kTileRows;  // rows of y per row tile

static_assert(kTokens * kTileRows <= WARPS * kWarp, "a thread per output of a row tile");

struct Weights {
    const SCALAR* w;
    int n, k;

    // The row of w that is row `index` of a row tile. Past the last row it is the last one, and its results are not stored.
    __device__ __forceinline__ long long row(int tile, int index) const {
        const int half = SILU_MUL && index >= kOutputs, rows = SILU_MUL ? n / 2 : n;
        return half * rows + min(tile * kOutputs + index - half * kOutputs, rows - 1);
    }
};

// What a lane holds of a step: rows g and g + 8 of the weight and, unless the kernel is fused, token g of each 8 of x.
struct Step {
    uint4 upper[2], lower[2], x[kFused ? 1 : N8_TILES][2];

    static __device__ __forceinline__ uint4 load_weight(const SCALAR* from, bool inside) {
        return inside ? ld_global_nc_v4(from) : uint4{0, 0, 0, 0};
    }

    // `column` is the lane's first column; columns from k on are zeros.
    __device__ __forceinline__ void load_weights(const Weights& weights, int tile, int column) {
        const int g = threadIdx.x % kWarp / 4;
        const SCALAR* above = weights.w + weights.row(tile, g) * weights.k + column;
        const SCALAR* below = weights.w + weights.row(tile, g + 8) * weights.k + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool inside = column + 8 * half < weights.k;
            upper[half] = load_weight(above + 8 * half, inside);
            lower[half] = load_weight(below + 8 * half, inside);
        }
    }

    __device__ __forceinline__ void load_x(const SCALAR* from, int m, int k, int column) {
        if constexpr (kFused) return;
#pragma unroll
        for (int tile = 0; tile < N8_TILES; ++tile) {
            const int token = threadIdx.x % kWarp / 4 + 8 * tile;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const SCALAR* unit = from + static_cast<long long>(token) * k + column + 8 * half;
                const bool inside = column + 8 * half < k && token < m;
                x[kFused ? 0 : tile][half] = inside ? *reinterpret_cast<const uint4*>(unit) : uint4{0, 0, 0, 0};
            }
        }
    }

    // Adds the step's products to `sums`. `column` is the one that the step was loaded with, `pitch` the units of 8 columns per
    // token in shared memory.
    __device__ __forceinline__ void multiply(float (&sums)[N8_TILES][4], Word shared_x, int m, int pitch, int column) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word first[4] = {upper[half].x, lower[half].x, upper[half].y, lower[half].y};
            const Word second[4] = {upper[half].z, lower[half].z, upper[half].w, lower[half].w};
#pragma unroll
            for (int tile = 0; tile < N8_TILES; ++tile) {
                uint4 x_unit = x[kFused ? 0 : tile][half];
                if constexpr (kFused) {
                    const int token = threadIdx.x % kWarp / 4 + 8 * tile;
                    x_unit = uint4{0, 0, 0, 0};
                    if (token < m) x_unit = ld_shared_v4(x_address(shared_x, pitch, token, column / kUnitValues + half));
                }
                mma_m16n8k16(sums[tile], first, x_unit.x, x_unit.y, static_cast<const SCALAR*>(nullptr));
                mma_m16n8k16(sums[tile], second, x_unit.z, x_unit.w, static_cast<const SCALAR*>(nullptr));
            }
        }
    }

    static __device__ __forceinline__ Word x_address(Word shared_x, int pitch, int token, int unit) {
        return shared_x + (token * pitch + (unit ^ token % 2)) * 16;
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

// The one output of a row tile that a thread stores, with the bias and residual that are added to it.
struct Output {
    int token, index, row;  // index: row in the row tile; row: of y
    bool stored;
    float bias, up_bias, residual;

    __device__ __forceinline__ Output(const SCALAR* biases, const SCALAR* residuals, int m, int n, int tile) {
        const int rows = SILU_MUL ? n / 2 : n;
        token = threadIdx.x / kOutputs, index = threadIdx.x % kOutputs, row = tile * kOutputs + index;
        stored = token < m && row < rows;
        bias = stored && biases ? to_float(biases[row]) : 0.0f;
        up_bias = SILU_MUL && stored && biases ? to_float(biases[rows + row]) : 0.0f;
        residual = ADD_RESIDUAL && stored ? to_float(residuals[static_cast<long long>(token) * rows + row]) : 0.0f;
    }

    __device__ __forceinline__ void put(const Partial* partials, SCALAR* y, int n) const {
        if (!stored) return;
        float sum = bias, up = up_bias;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            sum += partials[warp][token][index];
            if (SILU_MUL) up += partials[warp][token][kTileRows / 2 + index];
        }
        if (SILU_MUL) sum = silu_mul(sum, up);
        if (ADD_RESIDUAL) sum = residual + rounded(sum);
        store(y + static_cast<long long>(token) * (SILU_MUL ? n / 2 : n) + row, sum);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * kWarp, CTAS_PER_SM) semisparse_dense_decode(
    // Not __restrict__: the compiler could move loads that it takes for constants before griddepcontrol.wait.
    const SCALAR* x,            // [m, k], aligned to 16 bytes
    const SCALAR* w,            // [n, k], aligned to 16 bytes
    const SCALAR* bias,         // [n] or null
    const SCALAR* norm_weight,  // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,     // [m, n] with ADD_RESIDUAL
    SCALAR* y,                  // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k,
    int steps,                  // per warp and row tile, a multiple of STEPS
    float epsilon
) {
    extern __shared__ uint4 shared[];
    __shared__ Partial partials[2][WARPS];
    const int warp = threadIdx.x / kWarp, row_tiles = ((SILU_MUL ? n / 2 : n) + kOutputs - 1) / kOutputs;
    const int pitch = steps * WARPS * kStepColumns / kUnitValues;
    const Word shared_x = smem_address(shared);
    const Weights weights{w, n, k};
    griddepcontrol_launch_dependents();
    if constexpr (!kFused) griddepcontrol_wait();

    const int lane_column = threadIdx.x % 4 * kLaneColumns;
    auto column_of = [&](int step) { return (step * WARPS + warp) * kStepColumns + lane_column; };
    int next_tile = blockIdx.x, next_step = 0;
    auto advance = [&] {
        if (++next_step == steps) next_step = 0, next_tile += gridDim.x;
    };
    Step ring[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i, advance())
        if (next_tile < row_tiles) ring[i].load_weights(weights, next_tile, column_of(next_step));
    if constexpr (kFused) {
        const XStage<WARPS, kTokens> stage(norm_weight, m, k);
        griddepcontrol_wait();
        stage.copy(x, {}, pitch, epsilon, [&](int token, int unit) { return Step::x_address(shared_x, pitch, token, unit); });
    } else {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) ring[i].load_x(x, m, k, column_of(i));  // a row tile has at least STEPS steps
    }
    int parity = 0;
    for (int tile = blockIdx.x; tile < row_tiles; tile += gridDim.x, parity ^= 1) {
        const Output output(bias, residual, m, n, tile);
        float sums[N8_TILES][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; step += STEPS) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                ring[i].multiply(sums, shared_x, m, pitch, column_of(step + i));
                if (next_tile < row_tiles) {
                    ring[i].load_weights(weights, next_tile, column_of(next_step));
                    ring[i].load_x(x, m, k, column_of(next_step));
                }
                advance();
            }
        }
        store_partial(partials[parity][warp], sums);
        __syncthreads();
        output.put(partials[parity], y, n);
    }
}
