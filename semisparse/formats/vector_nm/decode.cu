// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for few tokens, straight from the packed bytes.
//
// A block computes one group of rows for up to TOKENS tokens; its warps share out the slots. A lane reads eight rows of one
// slot, 16 bytes: LENGTH / 8 lanes to a slot, so a warp reads consecutive memory, and one gathered number of x (of each token)
// serves eight weights. Panels of x lie in shared memory, the tokens of a column side by side. Sums are float32 and reduced in a
// fixed order: every run gives the same bits.
//
// Compiled for SCALAR (half or bfloat16, of x, w, bias and y), KEEP, WINDOW, LENGTH (a multiple of 8), TOKENS (1, 2, 4 or 8),
// WARPS and AHEAD.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = WARPS * kWarp;
constexpr int kUnit = 8;                        // weights in 16 bytes
constexpr int kLanes = LENGTH / kUnit;          // that share a slot
constexpr int kSlotsOfWarp = kWarp / kLanes;    // at a time
constexpr int kSlotsOfBlock = WARPS * kSlotsOfWarp;
constexpr int kAhead = AHEAD;                   // slots that a lane reads at once
constexpr int kStride = kAhead * kSlotsOfBlock;
constexpr int kParts = TOKENS > 4 ? TOKENS / 4 : 1;  // of the tokens, brought one after another: more spill
constexpr Word kAllLanes = 0xffffffffu;

using Sums = float[TOKENS][kUnit];

// A column's tokens in the panel: one load.
struct alignas(sizeof(SCALAR) * TOKENS) Column {
    SCALAR tokens[TOKENS];
};

// What a lane holds of kAhead slots: its weights, and where their columns stand in the panel.
struct Held {
    uint4 weights[kAhead];
    int columns[kAhead];
};

struct Group {
    const uint4* values;             // [total, kLanes]
    const unsigned char* positions;  // [total]

    // Reads from slot `at` on, every kSlotsOfBlock-th below `end`; zeros past it.
    __device__ __forceinline__ void read(Held& held, int at, int end, int first_column) const {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int slot = at + i * kSlotsOfBlock;
            const bool inside = slot < end;
            held.weights[i] = inside ? ld_global_nc_v4(values + static_cast<long long>(slot) * kLanes + threadIdx.x % kLanes) : uint4{};
            held.columns[i] = inside ? slot / KEEP * WINDOW + positions[slot] - first_column : 0;
        }
    }
};

__device__ __forceinline__ void add(Sums& sums, const Held& held, const Column* panel) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        const SCALAR* w = reinterpret_cast<const SCALAR*>(&held.weights[i]);
        const Column x = panel[held.columns[i]];
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const float of_token = to_float(x.tokens[token]);
#pragma unroll
            for (int row = 0; row < kUnit; ++row) sums[token][row] += of_token * to_float(w[row]);
        }
    }
}

// Brings eight columns from `first` on of some tokens to the panel.
__device__ __forceinline__ void fill_eight(Column* panel, const SCALAR* x, int part, int m, int k, int first) {
    constexpr int tokens = TOKENS / kParts;
    struct alignas(sizeof(SCALAR) * tokens) Some {
        SCALAR of[tokens];
    };
    uint4 eight[tokens];
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
        const int token = part * tokens + i;
        const bool inside = token < m && first < k;
        eight[i] = inside ? *reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + first) : uint4{};
    }
#pragma unroll
    for (int column = 0; column < kUnit; ++column) {
        Some some;
#pragma unroll
        for (int i = 0; i < tokens; ++i) some.of[i] = reinterpret_cast<const SCALAR*>(&eight[i])[column];
        reinterpret_cast<Some*>(panel + column)[part] = some;
    }
}

// Brings the columns [first, first + count) of x to shared memory, zero past column k and token m.
__device__ __forceinline__ void fill(Column* panel, const SCALAR* x, int m, int k, int first, int count) {
    if (WINDOW % kUnit == 0 && k % kUnit == 0) {
        // Eight columns at a time: one trip to memory for 4,096 columns.
#pragma unroll 1
        for (int i = threadIdx.x * kUnit; i < count; i += kThreads * kUnit) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) fill_eight(panel + i, x, part, m, k, first + i);
        }
        return;
    }
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        for (int i = threadIdx.x; i < count; i += kThreads) {
            const bool inside = token < m && first + i < k;
            panel[i].tokens[token] = inside ? x[static_cast<long long>(token) * k + first + i] : SCALAR(0.0f);
        }
    }
}

// Adds the sums of the lanes that read the same rows, then those of all warps, and stores. `partials` is [WARPS, LENGTH].
__device__ __forceinline__ void finish(Sums& sums, float* partials, const SCALAR* bias, SCALAR* y, int m, int n, int first_row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
        for (int row = 0; row < kUnit; ++row) {
#pragma unroll
            for (int step = kLanes; step < kWarp; step *= 2) {
                sums[token][row] += __shfl_xor_sync(kAllLanes, sums[token][row], step);
            }
        }
        __syncthreads();
        if (lane < kLanes) {
            float* own = partials + threadIdx.x / kWarp * LENGTH + lane * kUnit;
#pragma unroll
            for (int row = 0; row < kUnit; ++row) own[row] = sums[token][row];
        }
        __syncthreads();
        if (token >= m) continue;
        for (int row = threadIdx.x; row < LENGTH && first_row + row < n; row += kThreads) {
            float sum = bias ? to_float(bias[first_row + row]) : 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += partials[warp * LENGTH + row];
            store(y + static_cast<long long>(token) * n + first_row + row, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_decode(
    // Not __restrict__: loads that the compiler takes for constants could move before the wait for the previous kernel.
    const SCALAR* x, const SCALAR* values, const unsigned char* positions,
    const SCALAR* bias, SCALAR* y, int m, int n, int k, int total,
    int panel_windows,  // of x that shared memory holds
    int early           // whether the weight may be read before the previous kernel ends
) {
    extern __shared__ uint4 shared[];
    Column* panel = reinterpret_cast<Column*>(shared);
    const int first_token = blockIdx.y * TOKENS;
    const long long group = blockIdx.x;
    const Group weights{reinterpret_cast<const uint4*>(values + group * total * LENGTH), positions + group * total};
    const int own = threadIdx.x / kLanes;  // slot among the block's
    x += static_cast<long long>(first_token) * k;
    y += static_cast<long long>(first_token) * n;
    m -= first_token;
    Sums sums = {};
    if (!early) griddepcontrol_wait();
    for (int window = 0; window * KEEP < total; window += panel_windows) {
        const int first_column = window * WINDOW;
        const int end = min((window + panel_windows) * KEEP, total);
        int at = window * KEEP + own;
        // Two sets take turns: one would have to be moved, and so waited for, before the next is asked for.
        Held first, second;
        weights.read(first, at, end, first_column);  // on their way while x is brought
        weights.read(second, at + kStride, end, first_column);
        if (early && !window) griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if (window) __syncthreads();
        fill(panel, x, m, k, first_column, (end - window * KEEP) / KEEP * WINDOW);
        __syncthreads();
#pragma unroll 1
        for (; at < end; at += 2 * kStride) {
            add(sums, first, panel);
            weights.read(first, at + 2 * kStride, end, first_column);
            add(sums, second, panel);
            weights.read(second, at + 3 * kStride, end, first_column);
        }
    }
    __syncthreads();
    finish(sums, reinterpret_cast<float*>(shared), bias, y, m, n, static_cast<int>(group) * LENGTH);
}
