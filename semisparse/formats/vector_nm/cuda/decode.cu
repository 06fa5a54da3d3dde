// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for few tokens on CUDA cores, straight from kept vectors.
//
// Reads: the tensors of README.md, "Layout".
// Grid: (groups of LENGTH rows, tiles of TILE_M tokens). CTA: WARPS warps.
// Shared memory: a panel of x, [columns of `panel_windows` windows, TILE_M]; at the end the warps' partial sums, [WARPS,
// LENGTH].
// Warps: each takes its share of the group's slots. A lane loads eight rows of a slot, 16 bytes, and LENGTH / 8 lanes share a
// slot, so a warp loads consecutive memory. One column of x from shared memory serves eight weights. Meanwhile the loads of up
// to 2 * SLOTS_AHEAD slots of the lane are in flight. Accumulators are float32, reduced in a fixed order: every run gives the
// same bits.
// Bound: latency for one token: 9.3 us at 4096 x 4096, 16:32v32, with DRAM busy for 38 % (H200, ncu, cold caches). FMA and
// conversions for eight: 4.48 M instructions, DRAM at 19 %. decode_tensor.cu is faster from LENGTH 16 on.
//
// Macros: SCALAR (__half or __nv_bfloat16, of x, w, bias and y), KEEP, WINDOW, LENGTH (a multiple of 8), TILE_M (1, 2, 4 or
// 8), WARPS, SLOTS_AHEAD.

#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

constexpr int kWarp = 32;
constexpr int kThreads = WARPS * kWarp;
constexpr int kChunk = 8;                             // weights in 16 bytes
constexpr int kLanesPerSlot = LENGTH / kChunk;
constexpr int kWarpSlots = kWarp / kLanesPerSlot;     // slots that a warp loads at once
constexpr int kCtaSlots = WARPS * kWarpSlots;
constexpr int kStride = SLOTS_AHEAD * kCtaSlots;
constexpr int kPanelParts = TILE_M > 4 ? TILE_M / 4 : 1;  // parts of the tokens, loaded one after another: eight at once spill
constexpr Word kAllLanes = 0xffffffffu;

using Accumulators = float[TILE_M][kChunk];

// The tokens of one column of the panel, which a lane reads by one load.
struct alignas(sizeof(SCALAR) * TILE_M) Column {
    SCALAR tokens[TILE_M];
};

// One of a lane's two prefetch buffers: the weights of SLOTS_AHEAD slots, and the indices of their columns in the panel.
struct Slots {
    uint4 weights[SLOTS_AHEAD];
    int columns[SLOTS_AHEAD];
};

struct Group {
    const uint4* values;             // [slots, kLanesPerSlot]
    const unsigned char* positions;  // [slots]

    // Loads slot `at` and every kCtaSlots-th after it, SLOTS_AHEAD in all; from slot `end` on zeros instead.
    __device__ __forceinline__ void load(Slots& to, int at, int end, int first_column) const {
#pragma unroll
        for (int i = 0; i < SLOTS_AHEAD; ++i) {
            const int slot = at + i * kCtaSlots;
            const bool inside = slot < end;
            to.weights[i] = inside ? ld_global_nc_v4(values + static_cast<long long>(slot) * kLanesPerSlot +
                                                     threadIdx.x % kLanesPerSlot)
                                   : uint4{};
            to.columns[i] = inside ? slot / KEEP * WINDOW + positions[slot] - first_column : 0;
        }
    }
};

__device__ __forceinline__ void multiply(Accumulators& d, const Slots& slots, const Column* panel) {
#pragma unroll
    for (int i = 0; i < SLOTS_AHEAD; ++i) {
        const SCALAR* w = reinterpret_cast<const SCALAR*>(&slots.weights[i]);
        const Column x = panel[slots.columns[i]];
#pragma unroll
        for (int token = 0; token < TILE_M; ++token) {
            const float x_value = to_float(x.tokens[token]);
#pragma unroll
            for (int row = 0; row < kChunk; ++row) d[token][row] += x_value * to_float(w[row]);
        }
    }
}

// Copies eight columns of x, from column `first` on, to the panel, for one part of the tokens.
__device__ __forceinline__ void load_eight_columns(Column* panel, const SCALAR* x, int part, int m, int k, int first) {
    constexpr int tokens = TILE_M / kPanelParts;
    struct alignas(sizeof(SCALAR) * tokens) Part {
        SCALAR values[tokens];
    };
    uint4 eight[tokens];
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
        const int token = part * tokens + i;
        const bool inside = token < m && first < k;
        eight[i] = inside ? *reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + first) : uint4{};
    }
#pragma unroll
    for (int column = 0; column < kChunk; ++column) {
        Part column_part;
#pragma unroll
        for (int i = 0; i < tokens; ++i) column_part.values[i] = reinterpret_cast<const SCALAR*>(&eight[i])[column];
        reinterpret_cast<Part*>(panel + column)[part] = column_part;
    }
}

// Copies `count` columns of x, from `first` on, to shared memory; zeros past column k and token m.
__device__ __forceinline__ void load_panel(Column* panel, const SCALAR* x, int m, int k, int first, int count) {
    if (WINDOW % kChunk == 0 && k % kChunk == 0) {
        // Eight columns per thread: one round trip to memory for 4,096 columns.
#pragma unroll 1
        for (int i = threadIdx.x * kChunk; i < count; i += kThreads * kChunk) {
#pragma unroll
            for (int part = 0; part < kPanelParts; ++part) load_eight_columns(panel + i, x, part, m, k, first + i);
        }
        return;
    }
#pragma unroll
    for (int token = 0; token < TILE_M; ++token) {
        for (int i = threadIdx.x; i < count; i += kThreads) {
            const bool inside = token < m && first + i < k;
            panel[i].tokens[token] = inside ? x[static_cast<long long>(token) * k + first + i] : SCALAR(0.0f);
        }
    }
}

// Adds the accumulators of lanes with the same rows, then the warps' partial sums, and stores. `partials`: [WARPS, LENGTH].
__device__ __forceinline__ void epilogue(Accumulators& d, float* partials, const SCALAR* bias, SCALAR* y, int m, int n,
                                         int first_row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int token = 0; token < TILE_M; ++token) {
#pragma unroll
        for (int row = 0; row < kChunk; ++row) {
#pragma unroll
            for (int step = kLanesPerSlot; step < kWarp; step *= 2) {
                d[token][row] += __shfl_xor_sync(kAllLanes, d[token][row], step);
            }
        }
        __syncthreads();
        if (lane < kLanesPerSlot) {
            float* own = partials + threadIdx.x / kWarp * LENGTH + lane * kChunk;
#pragma unroll
            for (int row = 0; row < kChunk; ++row) own[row] = d[token][row];
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
    // Not __restrict__: the compiler could move loads that it takes for constants before griddepcontrol.wait.
    const SCALAR* x, const SCALAR* values, const unsigned char* positions,
    const SCALAR* bias, SCALAR* y, int m, int n, int k, int slots,
    int panel_windows  // windows per panel of x
) {
    extern __shared__ uint4 shared[];
    Column* panel = reinterpret_cast<Column*>(shared);
    const int first_token = blockIdx.y * TILE_M;
    const long long group = blockIdx.x;
    const Group weights{reinterpret_cast<const uint4*>(values + group * slots * LENGTH), positions + group * slots};
    const int own = threadIdx.x / kLanesPerSlot;  // the lane's slot among the kCtaSlots that the CTA loads at once
    x += static_cast<long long>(first_token) * k;
    y += static_cast<long long>(first_token) * n;
    m -= first_token;
    Accumulators d = {};
    griddepcontrol_wait();
    for (int window = 0; window * KEEP < slots; window += panel_windows) {
        const int first_column = window * WINDOW;
        const int end = min((window + panel_windows) * KEEP, slots);
        int at = window * KEEP + own;
        // Two register sets alternate: a single one would be copied, and so waited for, before its next loads are issued.
        Slots first, second;
        weights.load(first, at, end, first_column);  // in flight while x is loaded
        weights.load(second, at + kStride, end, first_column);
        griddepcontrol_launch_dependents();
        if (window) __syncthreads();
        load_panel(panel, x, m, k, first_column, (end - window * KEEP) / KEEP * WINDOW);
        __syncthreads();
#pragma unroll 1
        for (; at < end; at += 2 * kStride) {
            multiply(d, first, panel);
            weights.load(first, at + 2 * kStride, end, first_column);
            multiply(d, second, panel);
            weights.load(second, at + 3 * kStride, end, first_column);
        }
    }
    __syncthreads();
    epilogue(d, reinterpret_cast<float*>(shared), bias, y, m, n, static_cast<int>(group) * LENGTH);
}
