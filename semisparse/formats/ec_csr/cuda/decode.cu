// y[m, n] = x[m, k] * w[n, k]^T, w in row panels, for 1 to 16 tokens (skinny GEMM on FMA units).
//
// Grid: (panels, passes of TOKENS tokens). CTA: 16 warps. Warp s has segment s of the panel's lists, lane l the columns l, l
// + 32, ...: so no two lanes of a warp read different words of one bank of x.
// Shared memory (bytes: DecodeSchedule.shared_bytes): x [K, TOKENS], as float32 if TOKENS is 1; partial sums [segments, span,
// lanes, TOKENS] float32; the row at which each lane begins each segment, int; with TOKENS up to 2, the stages of stages.cuh.
// Layout: `Row panels` in README.md.
//
// Each lane accumulates a row in registers and writes the partial sum to shared memory at the end of the row. Last, each warp adds
// the partial sums of two to four rows of the panel. All sums have a fixed order: every run returns the same bits.
//
// What bounds it (one token, 70 %, H200; README.md): issue slots, 74 % busy at 11008 x 4096, and DRAM, 71 % at 28672 x 8192.
// Half of the 7 us at 4096 x 4096 is prologue and epilogue.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float: x, w, bias and y), TOKENS, DELTA_BITS (4 or 8), INDEX (unsigned short
// or unsigned int, of bases), PANEL_ROWS (at most 64), STAGES, and CTAS_PER_SM (that registers leave room for).

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "scalars.cuh"
#include "stages.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = kSegments * kWarp;

// All tokens' values of a column of x. One token is widened once, on its way to shared memory; more keep their width, to fit.
#if TOKENS == 1
struct Feature {
    float values[1];
};
#else
struct alignas(TOKENS * sizeof(SCALAR) < 16 ? TOKENS * sizeof(SCALAR) : 16) Feature {
    SCALAR values[TOKENS];
};
#endif

// A lane's offset in x is counted in units: 128 units are the distance between two of its columns. A unit is a whole number of
// bytes, and 128 fits the byte by which dp4a multiplies each delta.
constexpr int kUnits = 128;
constexpr int kUnitBytes = kWarp * sizeof(Feature) / kUnits;
static_assert(kUnitBytes * kUnits == kWarp * sizeof(Feature), "whole bytes");

struct Sums {
    float values[TOKENS];
};

__device__ __forceinline__ SCALAR scalar_of_low_bits(Word word) { return *reinterpret_cast<const SCALAR*>(&word); }

// Copies x to shared memory, and zeros from column k to the lanes' last ones. In place of
// tokens past m it copies token m - 1 again; their outputs are not stored.
__device__ __forceinline__ void stage_x(Feature* features, const SCALAR* x, int first, int m, int k, int columns) {
    const SCALAR* rows[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) rows[token] = x + (long long)min(first + token, m - 1) * k;
    int done = 0;
#if TOKENS == 1
    if (k % kVector == 0 && reinterpret_cast<unsigned long long>(rows[0]) % 16 == 0) {
        for (int at = threadIdx.x; at < k / kVector; at += kThreads) {
            const uint4 bits = reinterpret_cast<const uint4*>(rows[0])[at];
            const SCALAR* values = reinterpret_cast<const SCALAR*>(&bits);
#pragma unroll
            for (int part = 0; part < kVector; part += 4) {
                reinterpret_cast<float4*>(features)[(at * kVector + part) / 4] = {
                    to_float(values[part]), to_float(values[part + 1]), to_float(values[part + 2]), to_float(values[part + 3])
                };
            }
        }
        done = k;
    }
#endif
#if TOKENS > 1
    // Two columns of each token at a time.
    if (sizeof(SCALAR) == 2 && k % 2 == 0 && reinterpret_cast<unsigned long long>(x) % 4 == 0) {
#pragma unroll 2
        for (int column = 2 * threadIdx.x; column < columns; column += 2 * kThreads) {
            Feature pair[2];
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const Word both = column < k ? *reinterpret_cast<const Word*>(rows[token] + column) : 0;
                pair[0].values[token] = scalar_of_low_bits(both);
                pair[1].values[token] = scalar_of_low_bits(both >> 16);
            }
            features[column] = pair[0];
            features[column + 1] = pair[1];
        }
        return;
    }
#endif
    for (int column = done + threadIdx.x; column < columns; column += kThreads) {
        Feature feature;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
#if TOKENS == 1
            feature.values[token] = column < k ? to_float(rows[token][column]) : 0.0f;
#else
            feature.values[token] = column < k ? rows[token][column] : SCALAR(0.0f);
#endif
        }
        features[column] = feature;
    }
}

// Adds the segments' partial sums of row `row` of the panel, and stores its outputs. A warp does this for a row.
__device__ __forceinline__ void reduce_row(
    const Sums* partial, const int* first_rows, int span, const SCALAR* bias, SCALAR* y, int row, int first, int m, int n
) {
    const int lane = threadIdx.x % kWarp;
    Sums sums = {};
    // Without branches, so that the reads of one segment do not wait for those of another.
#pragma unroll (TOKENS < 4 ? 8 : 4)
    for (int segment = 0; segment < kSegments; ++segment) {
        const Word at = row - first_rows[segment * kWarp + lane];
        const Sums part = partial[(segment * span + min(at, static_cast<Word>(span) - 1)) * kWarp + lane];
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) sums.values[token] += at < span ? part.values[token] : 0.0f;
    }
    const int number = blockIdx.x * kPanelRows + row;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        const float sum = warp_sum(sums.values[token]);
        if (lane == 0 && number < n && first + token < m) {
            store(y + (long long)(first + token) * n + number, sum + (bias ? to_float(bias[number]) : 0.0f));
        }
    }
}

// Where a lane is in its list and in x, and its accumulators of the current row.
struct Cursor {
    const char* features;
    int position, end;  // in units: the lane's offset in x, and the offset at which a row ends
    Sums* partial;      // of the current row
    Sums sums;

    // Reads all that a load needs of x before it writes a partial sum: else each read would wait for the writes before it.
    __device__ __forceinline__ void use(const Load& now) {
        const Positions<kUnits> positions(now.deltas);
        const Word words[4] = {now.values.x, now.values.y, now.values.z, now.values.w};
        Feature read[kVector];
        bool ended[kVector / kRowMultiple];
#pragma unroll
        for (int entry = 0; entry < kVector; ++entry) {
            int at = positions.after(position, entry);
            if (entry % kRowMultiple == 0) {
                const int passed = at >= end ? end : 0;
                ended[entry / kRowMultiple] = passed;
                at -= passed;
                position -= passed;
            }
            read[entry] = *reinterpret_cast<const Feature*>(features + at * kUnitBytes);
            if (positions.restarts_after(entry)) position = at;
        }
#pragma unroll
        for (int entry = 0; entry < kVector; ++entry) {
            if (entry % kRowMultiple == 0 && ended[entry / kRowMultiple]) {
                *partial = sums;
                partial += kWarp;
                sums = Sums{};
            }
            const float weight = scalar_at(words, entry);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) sums.values[token] += weight * to_float(read[entry].values[token]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_ec_csr_decode(
    const SCALAR* x,         // [m, k]
    const uint4* values,     // [loads, 32], kVector values each
    const void* deltas,      // [loads, 32], kVector deltas each
    const INDEX* bases,      // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    const SCALAR* bias,      // [n] or null
    SCALAR* y,               // [m, n]
    int m, int n, int k, int span  // span: the most rows that one segment of a list covers
) {
    extern __shared__ __align__(16) char shared[];  // x, partial sums, first rows, stages
    const int segment = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int lane_columns = (k + kWarp - 1) / kWarp;
    Feature* features = reinterpret_cast<Feature*>(shared);
    Sums* partial = reinterpret_cast<Sums*>(features + lane_columns * kWarp);
    int* first_rows = reinterpret_cast<int*>(partial + kThreads * span);

    // bases and panel_loads, which only this kernel reads, are prefetched to L2 before griddepcontrol.wait.
    const int own_base = blockIdx.x * kThreads + threadIdx.x;
    if (lane % (32 / sizeof(INDEX)) == 0) prefetch_global_L2(bases + own_base);
    if (threadIdx.x == 0) prefetch_global_L2(panel_loads + blockIdx.x);
    for (int at = threadIdx.x; at < kThreads * span; at += kThreads) partial[at] = Sums{};
    griddepcontrol_wait();
    const int base = bases[own_base];
    const int start = panel_loads[blockIdx.x], loads = panel_loads[blockIdx.x + 1] - start;
    const int begin = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - begin;
    const int first = blockIdx.y * TOKENS;
    stage_x(features, x, first, m, k, lane_columns * kWarp);  // requested after the weight, x would arrive after it
    const List list(values, deltas, (long long)(start + begin) * kWarp + lane);
#if TOKENS < 4
    SharedStages<kThreads> stages(reinterpret_cast<const char*>(first_rows + kThreads));
#else
    RegisterStages stages;
#endif
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
        if (stage < count) stages.start(list, stage, stage);
        cp_async_commit_group();
    }
    griddepcontrol_launch_dependents();
    const int row = base / lane_columns;
    first_rows[threadIdx.x] = row;
    __syncthreads();

    Cursor cursor{shared, (base - row * lane_columns) * kUnits + lane * (kUnits / kWarp), lane_columns * kUnits,
                  partial + segment * span * kWarp + lane, {}};
    for (int done = 0; done < count; done += STAGES) {
        const List next(list.values + done * kWarp, list.deltas + done * (kWarp * kDeltaBytes), STAGES * kWarp);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (done + stage >= count) break;
            const Load now = stages.take(stage);
            if (done + stage + STAGES < count) stages.start(next, stage, stage);
            cp_async_commit_group();
            cursor.use(now);
        }
    }
    *cursor.partial = cursor.sums;
    __syncthreads();
    for (int number = segment; number < kPanelRows; number += kSegments) {
        reduce_row(partial, first_rows, span, bias, y, number, first, m, n);
    }
}
