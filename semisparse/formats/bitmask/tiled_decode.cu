// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and m of 1 to TOKENS.
//
// A warp turns a tile into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand; tokens are the 8 columns of
// the other, so one token and eight cost the same pass. Each mma step takes 4 columns of every lane's block, so the
// fragment's 16 columns are a permutation of K, which x follows.
//
// A block computes ROW_TILES tiles of rows at a time, SPLITS warps to each, the columns dealt out among them; blocks walk
// over the rows. A warp's next tile is in flight while it computes one. Sums are float32 and reduced in a fixed order:
// every run gives the same bits.
//
// Compiled for SCALAR (half or bfloat16, of x, w and bias), OUT (of y), KEEP (values a block), TOKENS (8 or 16), SPLITS,
// ROW_TILES.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tiled.cuh"

constexpr int kWarps = SPLITS * ROW_TILES;
constexpr int kThreads = kWarps * kWarp;
constexpr int kUnit = 8;                   // values of x in 16 bytes: two steps of a lane
constexpr int kUnits = kColumns / kUnit;
constexpr int kHead = 2;                   // units of x that a thread holds while weights are asked for
constexpr int kTokenGroups = TOKENS / 8;

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(float* place, float value) { *place = value; }

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&w)[4], Word low, Word high, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&w)[4], Word low, Word high, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

// Even and odd steps have sums of their own: an mma need not wait for the one before.
using Sums = float[2][kTokenGroups][4];

// Adds a tile's products. `x` are the shared addresses of the lane's token and block, for tokens 0 to 7 and 8 to 15.
template <int step = 0>
__device__ __forceinline__ void multiply(Sums& sums, Rows& rows, const Word (&x)[kTokenGroups],
                                         uint4 (&held)[kTokenGroups]) {
    const uint2 a = rows.upper.take<step>();
    const uint2 b = rows.lower.take<step>();
    const Word weights[4] = {a.x, b.x, a.y, b.y};
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
        if (step % 2 == 0) held[i] = read_shared4(x[i] + step / 2 * 16);
        mma(sums[step % 2][i], weights, step % 2 ? held[i].z : held[i].x, step % 2 ? held[i].w : held[i].y,
            static_cast<const SCALAR*>(nullptr));
    }
    if constexpr (step + 1 < kSteps) multiply<step + 1>(sums, rows, x, held);
}

// x lies in shared memory token by token in units, one place in nine empty, so that lanes meet in no bank.
__device__ __forceinline__ int padded(int unit) { return unit + unit / kUnit; }

__device__ __forceinline__ int panel_pitch(int tiles) { return padded(tiles * kUnits) + (tiles % 2 ? 0 : 4); }

// Columns of x to bring to shared memory: [first, first + tiles * 256), zero past column k.
struct Source {
    const SCALAR* x;  // [m, k]
    int m, k, first, tiles;
    bool vectors;     // whether every row of x is 16-byte aligned

    __device__ __forceinline__ int units() const { return tiles * kUnits; }

    __device__ __forceinline__ uint4 unit(int token, int at) const {
        const int column = first + at * kUnit;
        if (column >= k) return uint4{};
        return __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + column));
    }

    // Copies all but the first `held_back` units of token 0.
    __device__ __forceinline__ void copy(uint4* panel, int held_back) const {
        const int pitch = panel_pitch(tiles);
        if (vectors) {
#pragma unroll 1
            for (int at = threadIdx.x; at < units(); at += kThreads) {
#pragma unroll 4
                for (int token = at < held_back; token < m; ++token) panel[token * pitch + padded(at)] = unit(token, at);
            }
            return;
        }
#pragma unroll 1
        for (int token = 0; token < m; ++token) {
#pragma unroll 4
            for (int i = threadIdx.x; i < units() * kUnit; i += kThreads) {
                SCALAR* to = reinterpret_cast<SCALAR*>(panel + token * pitch + padded(i / kUnit)) + i % kUnit;
                *to = first + i < k ? x[static_cast<long long>(token) * k + first + i] : SCALAR(0.0f);
            }
        }
    }
};

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Brings the first columns of x to shared memory, and a warp's first tile on its way.
//
// Weights go first where the previous kernel may still be writing x. Else a token's first units of x do, lest they queue
// behind the weights; they wait in registers. An earlier build that used cp.async took 9.1 us for 7.9 at 4096 x 4096.
__device__ __forceinline__ void start(Tile& tile, const Word* from, bool any, const Source& source, uint4* panel,
                                      bool dependent) {
    const int lane = threadIdx.x % kWarp;
    const int held_back = source.vectors ? min(kHead * kThreads, source.units()) : 0;
    uint4 head[kHead];
    if (any && dependent) load(tile, from, lane);
    if (dependent) wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kHead; ++i) {
        const int at = threadIdx.x + i * kThreads;
        if (at < held_back) head[i] = source.unit(0, at);
    }
    if (any && !dependent) load(tile, from, lane);
#pragma unroll
    for (int i = 0; i < kHead; ++i) {
        const int at = threadIdx.x + i * kThreads;
        if (at < held_back) panel[padded(at)] = head[i];
    }
    source.copy(panel, held_back);
    __syncthreads();
}

using Partial = float[TOKENS][kRows];  // a warp's sums

// Lane 4 * g + t holds the rows g and g + 8 of the tokens 2 t and 2 t + 1.
__device__ __forceinline__ void keep(Partial& partial, const Sums& sums, int m) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 4 * kTokenGroups; ++i) {
        const int token = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const float sum = sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
        if (token < m) partial[token][lane / 4 + i / 2 % 2 * 8] = sum;
    }
}

// Adds what the SPLITS warps of a tile of rows kept; each of them stores a share. `index` is the thread's among them.
__device__ __forceinline__ void finish(const Partial* partials, const SCALAR* bias, OUT* y, int m, int n, int first_row,
                                       int index) {
    for (int i = index; i < m * kRows; i += SPLITS * kWarp) {
        const int row = first_row + i % kRows;
        if (row >= n) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) sum += partials[split][i / kRows][i % kRows];
        store(y + static_cast<long long>(i / kRows) * n + row, sum);
    }
}

// Without the 1 the compiler keeps to 80 registers and too few loads in flight: 0.5 us slower at 4096 x 4096 (H200).
extern "C" __global__ void __launch_bounds__(kThreads, 1) semisparse_bitmask_tiled_decode(
    const SCALAR* __restrict__ x,      // [m, k]
    const Word* __restrict__ tiles,    // [row_tiles, column_tiles, kTileWords]
    const SCALAR* __restrict__ bias,   // [n] or null
    OUT* __restrict__ y,               // [m, n]
    int m, int n, int k, int row_tiles, int column_tiles,
    int panel_tiles,                   // column tiles of x that shared memory holds: all, or a multiple of SPLITS
    int vectors,                       // whether every row of x is 16-byte aligned
    int dependent                      // whether this launch may begin before the previous kernel ends
) {
    extern __shared__ uint4 shared[];
    __shared__ Partial partials[2][kWarps];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int split = warp % SPLITS;
    const Word slots = shared_address(shared) + warp * kStageBytes + lane * 4;
    uint4* panel = shared + kWarps * kStageBytes / 16;
    const int stride = gridDim.x * ROW_TILES;
    const int first_group = blockIdx.x * ROW_TILES;
    int row_tile = first_group + warp / SPLITS;
    auto first_of = [&](int row) { return tiles + (static_cast<long long>(row) * column_tiles + split) * kTileWords; };
    const Word* next = first_of(row_tile);
    Tile tile;
    let_next_kernel_start();
    const Source head{x, m, k, 0, min(panel_tiles, column_tiles), vectors != 0};
    start(tile, next, row_tile < row_tiles && split < column_tiles, head, panel, dependent);

    int parity = 0;
    // Every warp of a block walks as often, whether or not its tile of rows exists.
    for (int group = first_group; group < row_tiles; group += stride, row_tile += stride, parity ^= 1) {
        Sums sums = {};
        for (int first = 0; first < column_tiles; first += panel_tiles) {
            const int held = min(panel_tiles, column_tiles - first);
            if (panel_tiles < column_tiles && (group != first_group || first)) {
                __syncthreads();
                Source{x, m, k, first * kColumns, held, vectors != 0}.copy(panel, 0);
                __syncthreads();
            }
            Word of_x[kTokenGroups];
#pragma unroll
            for (int i = 0; i < kTokenGroups; ++i) {
                const int place = min(lane / 4 + 8 * i, m - 1) * panel_pitch(held) + padded(lane % 4 * kUnit + split * kUnits);
                of_x[i] = shared_address(panel + place);
            }
            for (int at = first + split; row_tile < row_tiles && at < first + held; at += SPLITS) {
                Rows rows(tile, slots);
                // The next tile: further along these rows, or the first of the next rows.
                const bool more_columns = at + SPLITS < column_tiles;
                if (more_columns || row_tile + stride < row_tiles) {
                    next = more_columns ? next + SPLITS * kTileWords : first_of(row_tile + stride);
                    load(tile, next, lane);
                }
                uint4 units_of_x[kTokenGroups];
                multiply(sums, rows, of_x, units_of_x);
#pragma unroll
                for (int i = 0; i < kTokenGroups; ++i) of_x[i] += padded(SPLITS * kUnits) * 16;
            }
        }
        keep(partials[parity][warp], sums, m);
        __syncthreads();
        if (row_tile < row_tiles)
            finish(&partials[parity][warp - split], bias, y, m, n, row_tile * kRows, split * kWarp + lane);
    }
}
