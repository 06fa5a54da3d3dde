// y[m, n] = x[m, k] * w[n, k]^T, w in row panels, for up to TOKENS tokens on tensor cores, in one pass over the weight.
//
// semisparse_ec_csr_decode_mma: split-K by lanes. Grid: (panels * 32 / CTA_LANES). A CTA expands what CTA_LANES lanes have of
// a panel to a dense tile in shared memory and multiplies it; its sums go to parts[split, token, row].
// CTA: WARPS warps. First each thread walks a part of a segment of one lane's list and scatters its weights over the tile;
// then warp w multiplies the 64-byte strips w, w + WARPS, ... of all rows with mma.m16n8k16; then the warps' sums are added.
// Shared memory: the tiles of w [rows of the panel, padded to 16] and x [TOKENS], `stride` bytes per row; then, in their
// place, the warps' accumulators [WARPS, TOKENS, kSumRows] float32. MmaSchedule.shared_bytes computes the larger.
// Columns 32 g to 32 g + 31 are column group g. A row of a tile holds the CTA's lanes of group 0, then those of group 1, ... Rows
// are an odd number of strips apart, so that eight threads that read 64 bytes of two rows hit different banks.
//
// semisparse_ec_csr_decode_mma_reduce: adds the splits and the bias. Grid: (n / 256, m); one thread per output.
// All sums have a fixed order: every run returns the same bits.
//
// What bounds it (16 tokens, 70 %, H200; README.md): latency. A CTA walks its lists, copies x, multiplies and reduces one after
// another; the shared-memory pipe is 40 to 67 % busy, tensor cores 2 %.
//
// Compiled for SCALAR (__half or __nv_bfloat16), TOKENS (a multiple of 8), DELTA_BITS (4 or 8), INDEX (unsigned short or
// unsigned int, of bases), PANEL_ROWS (at most 64), PAIRED, CTA_LANES (2, 4 or 8), WARPS (2 * WARPS is a multiple of
// CTA_LANES, at most 32) and CTAS_PER_SM (that registers leave room for).

#include "lists.cuh"
#include "panel_row.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = WARPS * kWarp;
constexpr int kSplits = kWarp / CTA_LANES;
constexpr int kParts = kThreads / (kSegments * CTA_LANES);  // of a segment
constexpr int kUnit = CTA_LANES * sizeof(SCALAR);           // bytes of a tile's row per position
constexpr int kStrip = 64;                                  // bytes of a row that a warp multiplies at a time
constexpr int kStages = 2;                                  // loads in flight while one is used
constexpr int kRowTiles = (kPanelRows + 15) / 16, kTokenTiles = TOKENS / 8;
constexpr int kTileRows = 16 * kRowTiles;
constexpr int kSumRows = kTileRows + 4;  // padded against bank conflicts

struct alignas(kUnit) Columns {
    SCALAR values[CTA_LANES];
};

// Copies the columns of this CTA's lanes, zeros past column k. Rows of tokens past m keep the zeros that are there.
__device__ __forceinline__ void stage_x(char* tile, int stride, const SCALAR* x, int first_lane, int m, int k) {
    const int lane = threadIdx.x % kWarp, lane_columns = (k + kWarp - 1) / kWarp;
    const bool aligned = k % kWarp == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0;
    for (int token = threadIdx.x / kWarp; token < min(TOKENS, m); token += WARPS) {
        const SCALAR* row = x + (long long)token * k + first_lane;
#pragma unroll 4
        for (int group = lane; group < lane_columns; group += kWarp) {
            Columns columns = {};
            if (aligned) {
                columns = *reinterpret_cast<const Columns*>(row + group * kWarp);
            } else {
#pragma unroll
                for (int at = 0; at < CTA_LANES; ++at) {
                    if (group * kWarp + first_lane + at < k) columns.values[at] = row[group * kWarp + at];
                }
            }
            *reinterpret_cast<Columns*>(tile + token * stride + group * kUnit) = columns;
        }
    }
}

// Where a thread is in its list: `row` is the address of its lane's first value in the current row of the tile, `position` the
// offset in that row, `end` the row's length and `stride` the distance of rows, all in bytes.
struct Cursor {
    char* row;
    int position, end, stride;

    // Writes a load's weights to the tile.
    __device__ __forceinline__ void use(const Load& now) {
        const Positions<kUnit> positions(now.deltas);
#pragma unroll
        for (int entry = 0; entry < kVector; ++entry) {
            int at = positions.after(position, entry);
            if (entry % kRowMultiple == 0) {
                const bool passed = at >= end;
                row += passed ? stride : 0;
                at -= passed ? end : 0;
                position -= passed ? end : 0;
            }
            if (positions.restarts_after(entry)) position = at;
            const unsigned short bits = entry % 2 ? now.word(entry) >> 16 : now.word(entry);
            // A zero of either sign is padding.
            if (bits & 0x7fffu) *reinterpret_cast<unsigned short*>(row + at) = bits;
        }
    }
};

__device__ __forceinline__ uint4 load_strip(const char* tile, int row, int stride, int at) {
    return *reinterpret_cast<const uint4*>(tile + row * stride + at);
}

using Accumulators = float[kRowTiles][kTokenTiles][4];

// Multiplies this warp's strips. Lane 4 g + t reads 16 bytes of the rows and tokens g, at byte 16 t of a strip: the columns
// of both operands are permuted alike.
__device__ __forceinline__ void multiply(Accumulators& sums, const char* weights, const char* features, int stride, int bytes) {
    const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    for (int strip = warp; strip * kStrip < bytes; strip += WARPS) {
        const int at = strip * kStrip + 16 * t;
        uint4 b[kTokenTiles];
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) b[j] = load_strip(features, 8 * j + g, stride, at);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const uint4 low = load_strip(weights, 16 * i + g, stride, at);
            const uint4 high = load_strip(weights, 16 * i + 8 + g, stride, at);
            const Word first_half[4] = {low.x, high.x, low.y, high.y}, second_half[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
                mma_m16n8k16(sums[i][j], first_half, b[j].x, b[j].y, static_cast<const SCALAR*>(nullptr));
                mma_m16n8k16(sums[i][j], second_half, b[j].z, b[j].w, static_cast<const SCALAR*>(nullptr));
            }
        }
    }
}

// Writes a warp's accumulators to shared memory, [warps, TOKENS, kSumRows].
__device__ __forceinline__ void store_accumulators(const Accumulators& sums, float* of_warps) {
    const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
            for (int number = 0; number < 4; ++number) {
                const int token = 8 * j + 2 * t + number % 2;
                of_warps[(warp * TOKENS + token) * kSumRows + 16 * i + number / 2 * 8 + g] = sums[i][j][number];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_ec_csr_decode_mma(
    const SCALAR* x,         // [m, k]
    const uint4* values,     // [loads, 32], kVector values each
    const void* deltas,      // [loads, 32], kVector deltas each
    const INDEX* bases,      // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    float* parts,            // [splits, m, n]
    int m, int n, int k, int stride  // stride: bytes from a row of a tile to the next, an odd multiple of 64
) {
    extern __shared__ __align__(16) char shared[];  // the tiles of w and x; then the warps' accumulators
    const int split = blockIdx.x % kSplits, panel = blockIdx.x / kSplits;
    const int own = threadIdx.x % CTA_LANES, part = threadIdx.x / CTA_LANES % kParts;
    const int segment = threadIdx.x / (CTA_LANES * kParts);
    const int warp = threadIdx.x / kWarp, lane = split * CTA_LANES + own;
    const int lane_columns = (k + kWarp - 1) / kWarp;
    char* features = shared + kTileRows * stride;

    for (int at = threadIdx.x; at < (kTileRows + TOKENS) * stride / 16; at += kThreads) {
        reinterpret_cast<uint4*>(shared)[at] = uint4{};
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int position = bases[(panel * kSegments + segment) * kWarp + lane];
    const int start = panel_loads[panel], loads = panel_loads[panel + 1] - start;
    const int first = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - first;
    const int from = part * count / kParts, left = (part + 1) * count / kParts - from;
    const List list(values, deltas, (long long)(start + first + from) * kWarp + lane);
    Load stages[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        if (stage < left) stages[stage] = list.get(stage);
    }
    if constexpr (kParts > 1) {
        // A part begins after the deltas of the parts before it: a prefix sum over the threads of this lane and segment.
        int passed = 0;
#pragma unroll 4
        for (int at = 0; at < left; ++at) passed = Positions<1>(list.get_deltas(at)).end(passed);
        position -= passed;
#pragma unroll
        for (int step = 1; step < kParts; step *= 2) {
            const int before = __shfl_sync(kAllLanes, passed, threadIdx.x - step * CTA_LANES);
            passed += part >= step ? before : 0;
        }
        position += passed;
    }
    __syncthreads();
    stage_x(features, stride, x, split * CTA_LANES, m, k);
    const int row = position / lane_columns;
    Cursor cursor{shared + row * stride + own * (int)sizeof(SCALAR), (position - row * lane_columns) * kUnit,
                  lane_columns * kUnit, stride};
    for (int done = 0; done < left; done += kStages) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            if (done + stage >= left) break;
            const Load now = stages[stage];
            if (done + stage + kStages < left) stages[stage] = list.get(done + stage + kStages);
            cursor.use(now);
        }
    }
    __syncthreads();

    Accumulators sums = {};
    multiply(sums, shared, features, stride, lane_columns * kUnit);
    __syncthreads();
    float* of_warps = reinterpret_cast<float*>(shared);
    store_accumulators(sums, of_warps);
    __syncthreads();
    for (int at = threadIdx.x; at < min(TOKENS, m) * kPanelRows; at += kThreads) {
        const int token = at / kPanelRows, of_panel = at % kPanelRows, number = row_of(panel, of_panel, n);
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += of_warps[(other * TOKENS + token) * kSumRows + of_panel];
        if (number < n) parts[((long long)split * m + token) * n + number] = sum;
    }
}

extern "C" __global__ void semisparse_ec_csr_decode_mma_reduce(
    const float* parts,  // [splits, m, n]
    const SCALAR* bias,  // [n] or null
    SCALAR* y,           // [m, n]
    int m, int n
) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (row >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < kSplits; ++split) sum += parts[((long long)split * m + token) * n + row];
    store(y + (long long)token * n + row, sum + (bias ? to_float(bias[row]) : 0.0f));
}
