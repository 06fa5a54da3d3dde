// parts[g, token, row] = sum over the g-th GROUP lanes' columns of x[token, column] * w[row, column] for an ec_csr weight in
// the layout `banks`, on tensor cores; the second kernel adds the parts.
//
// A thread block has a panel's rows and the columns of GROUP lanes. Its threads walk those lanes' lists, each segment cut
// into parts for a thread each, and scatter the weights over a tile of zeros in shared memory, beside x. A row of the tile
// has the columns of place 0, then those of place 1, ...; rows are 64 more than a multiple of 128 bytes apart, so that eight
// threads that read 64 bytes of two rows meet no bank twice. Every weight is read once, for any number of tokens up to
// TOKENS, and every sum is made in a fixed order.
//
// Compiled for SCALAR (__half or __nv_bfloat16), TOKENS (a multiple of 8), DELTA_BITS (4 or 8), INDEX (unsigned short or
// unsigned int, of bases), PANEL_ROWS (at most 64), GROUP (2, 4 or 8), WARPS (2 * WARPS is a multiple of GROUP, at most 32)
// and BLOCKS (that shall fit a processor).

#include "ptx/griddepcontrol.cuh"
#include "lists.cuh"
#include "ptx/mma.cuh"
#include "scalar.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = WARPS * kWarp;
constexpr int kGroups = kWarp / GROUP;
constexpr int kParts = kThreads / (kSegments * GROUP);  // of a segment
constexpr int kUnit = GROUP * sizeof(SCALAR);           // bytes of a place
constexpr int kStrip = 64;                              // bytes of a row that a warp multiplies at a time
constexpr int kAhead = 2;                               // loads under way while one is used
constexpr int kRowTiles = (kPanelRows + 15) / 16, kTokenTiles = TOKENS / 8;
constexpr int kTileRows = 16 * kRowTiles;
constexpr int kSumRows = kTileRows + 4;  // apart in memory, for the banks

struct alignas(kUnit) Piece {
    SCALAR values[GROUP];
};

// Copies the columns of this block's lanes, zeros past column k and past token m.
__device__ __forceinline__ void stage(char* tile, int stride, const SCALAR* x, int first_lane, int m, int k) {
    const int lane = threadIdx.x % kWarp, height = (k + kWarp - 1) / kWarp;
    const bool whole = k % kWarp == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0;
    for (int token = threadIdx.x / kWarp; token < min(TOKENS, m); token += WARPS) {
        const SCALAR* row = x + (long long)token * k + first_lane;
#pragma unroll 4
        for (int place = lane; place < height; place += kWarp) {
            Piece piece = {};
            if (whole) {
                piece = *reinterpret_cast<const Piece*>(row + place * kWarp);
            } else {
#pragma unroll
                for (int at = 0; at < GROUP; ++at) {
                    if (place * kWarp + first_lane + at < k) piece.values[at] = row[place * kWarp + at];
                }
            }
            *reinterpret_cast<Piece*>(tile + token * stride + place * kUnit) = piece;
        }
    }
}

// Where a thread stands in its list: the row's first byte in the tile, this lane's, and bytes from there.
struct Walk {
    char* row;
    int place, end, stride;

    // Writes the weights of a load.
    __device__ __forceinline__ void use(const Load& now) {
        const Places<kUnit> places(now.deltas);
#pragma unroll
        for (int step = 0; step < kVector; ++step) {
            int at = places.after(place, step);
            if (step % kRun == 0) {
                const bool passed = at >= end;
                row += passed ? stride : 0;
                at -= passed ? end : 0;
                place -= passed ? end : 0;
            }
            if (places.starts_anew(step)) place = at;
            const unsigned short bits = step % 2 ? now.word(step) >> 16 : now.word(step);
            // A zero of either sign is padding.
            if (bits & 0x7fffu) *reinterpret_cast<unsigned short*>(row + at) = bits;
        }
    }
};

__device__ __forceinline__ uint4 strip_of(const char* tile, int row, int stride, int at) {
    return *reinterpret_cast<const uint4*>(tile + row * stride + at);
}

using TileSums = float[kRowTiles][kTokenTiles][4];

// Multiplies this warp's strips. Lane 4 g + t reads 16 bytes of the rows and the tokens g, at byte 16 t of a strip.
__device__ __forceinline__ void multiply(TileSums& sums, const char* weights, const char* features, int stride, int bytes) {
    const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    for (int strip = warp; strip * kStrip < bytes; strip += WARPS) {
        const int at = strip * kStrip + 16 * t;
        uint4 b[kTokenTiles];
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) b[j] = strip_of(features, 8 * j + g, stride, at);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            const uint4 low = strip_of(weights, 16 * i + g, stride, at), high = strip_of(weights, 16 * i + 8 + g, stride, at);
            const Word first_half[4] = {low.x, high.x, low.y, high.y}, second_half[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
                mma_m16n8k16(sums[i][j], first_half, b[j].x, b[j].y, static_cast<const SCALAR*>(nullptr));
                mma_m16n8k16(sums[i][j], second_half, b[j].z, b[j].w, static_cast<const SCALAR*>(nullptr));
            }
        }
    }
}

// Shows a warp's sums to the others, [warps, TOKENS, kSumRows].
__device__ __forceinline__ void leave_sums(const TileSums& sums, float* of_warps) {
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

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_ec_csr_tiles(
    const SCALAR* x,         // [m, k]
    const uint4* values,     // [loads, 32], kVector values each
    const void* deltas,      // [loads, 32], kVector deltas each
    const INDEX* bases,      // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    float* parts,            // [groups, m, n]
    int m, int n, int k, int stride       // stride: bytes of a row of a tile, an odd multiple of 64
) {
    extern __shared__ __align__(16) char shared[];  // w's tile and x's; then the warps' sums
    const int group = blockIdx.x % kGroups, panel = blockIdx.x / kGroups;
    const int own = threadIdx.x % GROUP, part = threadIdx.x / GROUP % kParts, segment = threadIdx.x / (GROUP * kParts);
    const int warp = threadIdx.x / kWarp, lane = group * GROUP + own;
    const int height = (k + kWarp - 1) / kWarp;
    char* features = shared + kTileRows * stride;

    for (int at = threadIdx.x; at < (kTileRows + TOKENS) * stride / 16; at += kThreads) reinterpret_cast<uint4*>(shared)[at] = uint4{};
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int place = bases[(panel * kSegments + segment) * kWarp + lane];
    const int start = panel_loads[panel], loads = panel_loads[panel + 1] - start;
    const int first = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - first;
    const int from = part * count / kParts, left = (part + 1) * count / kParts - from;
    const List list(values, deltas, (long long)(start + first + from) * kWarp + lane);
    Load ring[kAhead];
#pragma unroll
    for (int at = 0; at < kAhead; ++at) {
        if (at < left) ring[at] = list.get(at);
    }
    if constexpr (kParts > 1) {
        int passed = 0;  // by this part, then by the ones up to it
#pragma unroll 4
        for (int at = 0; at < left; ++at) passed = Places<1>(list.get_deltas(at)).end(passed);
        place -= passed;
#pragma unroll
        for (int step = 1; step < kParts; step *= 2) {
            const int before = __shfl_sync(kAllLanes, passed, threadIdx.x - step * GROUP);
            passed += part >= step ? before : 0;
        }
        place += passed;
    }
    __syncthreads();
    stage(features, stride, x, group * GROUP, m, k);
    const int row = place / height;
    Walk walk{shared + row * stride + own * (int)sizeof(SCALAR), (place - row * height) * kUnit, height * kUnit, stride};
    for (int done = 0; done < left; done += kAhead) {
#pragma unroll
        for (int at = 0; at < kAhead; ++at) {
            if (done + at >= left) break;
            const Load now = ring[at];
            if (done + at + kAhead < left) ring[at] = list.get(done + at + kAhead);
            walk.use(now);
        }
    }
    __syncthreads();

    TileSums sums = {};
    multiply(sums, shared, features, stride, height * kUnit);
    __syncthreads();
    float* of_warps = reinterpret_cast<float*>(shared);
    leave_sums(sums, of_warps);
    __syncthreads();
    for (int at = threadIdx.x; at < min(TOKENS, m) * kPanelRows; at += kThreads) {
        const int token = at / kPanelRows, of_panel = at % kPanelRows, number = panel * kPanelRows + of_panel;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += of_warps[(other * TOKENS + token) * kSumRows + of_panel];
        if (number < n) parts[((long long)group * m + token) * n + number] = sum;
    }
}

extern "C" __global__ void semisparse_ec_csr_add_parts(
    const float* parts,  // [groups, m, n]
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
    for (int group = 0; group < kGroups; ++group) sum += parts[((long long)group * m + token) * n + row];
    store(y + (long long)token * n + row, sum + (bias ? to_float(bias[row]) : 0.0f));
}
