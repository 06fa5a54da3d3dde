// y[m, n] = x[m, k] * w[n, k]^T, w in row panels, for 1 to 16 tokens (skinny GEMM on FMA units).
//
// Grid: (panels, passes of TOKENS tokens). CTA: 16 warps. Warp s has segment s of the panel's lists, lane l the columns l, l
// + 32, ...: so no two lanes of a warp read different words of one bank of x.
// Shared memory (bytes: DecodeSchedule.shared_bytes): x [K, TOKENS], as float32 if TOKENS is 1; partial sums [segments, span,
// lanes, TOKENS] float32; the row at which each lane begins each segment, int; with RMS_NORM, sums of the warps [segments,
// TOKENS] float32; with TOKENS up to 2, the stages of stages.cuh.
// Layout: `Row panels` in README.md.
//
// A fused kernel (fusion.cuh) requests its first loads before griddepcontrol.wait. With RMS_NORM each CTA normalises x on its
// way to shared memory. SILU_MUL takes paired panels: a CTA has the rows r and n / 2 + r.
//
// Each lane accumulates a row in registers and writes the partial sum to shared memory at the end of the row. Last, each warp adds
// the partial sums of two to four rows of the panel. All sums have a fixed order: every run returns the same bits.
//
// What bounds it (one token, 70 %, H200; README.md): issue slots, 74 % busy at 11008 x 4096, and DRAM, 71 % at 28672 x 8192.
// Half of the 7 us at 4096 x 4096 is prologue and epilogue.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float: x, w, bias and y), TOKENS, DELTA_BITS (4 or 8), INDEX (unsigned short
// or unsigned int, of bases), PANEL_ROWS (at most 64), PAIRED, STAGES, CTAS_PER_SM (that registers leave room for), and what
// fusion.cuh takes.

#include "fusion.cuh"
#include "panel_row.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "scalars.cuh"
#include "stages.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kOutputs = SILU_MUL ? kHalfRows : kPanelRows;  // rows of y per panel
constexpr int kThreads = kSegments * kWarp;

static_assert(!SILU_MUL || PAIRED, "gate and up of an output are in one panel");
static_assert(!kFused || TOKENS <= 2, "a warp keeps the residuals of its outputs in a register per lane");

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
            // Not __ldg, which the compiler may move before griddepcontrol.wait.
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

// Normalises x on its way to shared memory, in units of 16 bytes. x and its rows are aligned to 16 bytes, k is a multiple of
// kVector. Constructed before griddepcontrol.wait: it loads the norm's weight of the thread's first unit.
struct NormStage {
    const SCALAR* norm_weight;
    int units;
    uint4 first_weight;

    __device__ __forceinline__ NormStage(const SCALAR* norm_weight, int k) : norm_weight(norm_weight), units(k / kVector) {
        first_weight = load(norm_weight, threadIdx.x);
    }

    __device__ __forceinline__ uint4 load(const SCALAR* row, int unit) const {
        return unit < units ? reinterpret_cast<const uint4*>(row)[unit] : uint4{};
    }

    // Copies all tokens, normalised, and zeros from column k on. `sums` are kSegments * TOKENS floats of shared memory. The
    // unit that a thread loads last stays in its registers. Ends without a barrier.
    __device__ __forceinline__ void copy(Feature* features, const SCALAR* x, int first, int m, int k, int columns, float epsilon,
                                         float* sums) const {
        const int own = threadIdx.x, last = own + max(units - 1 - own, 0) / kThreads * kThreads;
        uint4 loaded[TOKENS];
        float squares[TOKENS] = {};
        auto load_all = [&](int unit) {
#pragma unroll
            for (int token = 0; token < TOKENS; ++token)
                loaded[token] = load(x + (long long)min(first + token, m - 1) * k, unit);
        };
#pragma unroll 1
        for (int unit = own; unit < units; unit += kThreads) {
            load_all(unit);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const SCALAR* values = reinterpret_cast<const SCALAR*>(&loaded[token]);
#pragma unroll
                for (int i = 0; i < kVector; ++i) squares[token] += to_float(values[i]) * to_float(values[i]);
            }
        }
        float scales[TOKENS];
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            squares[token] = warp_sum(squares[token]);
            if (own % kWarp == 0) sums[token * kSegments + own / kWarp] = squares[token];
        }
        __syncthreads();
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < kSegments; ++warp) sum += sums[token * kSegments + warp];
            scales[token] = rsqrtf(sum / k + epsilon);
        }
#pragma unroll 1
        for (int unit = last; unit >= 0 && own < units; unit -= kThreads) {
            if (unit != last) load_all(unit);
            store_unit(features + unit * kVector, loaded, unit == own ? first_weight : load(norm_weight, unit), scales);
        }
        for (int column = k + own; column < columns; column += kThreads) features[column] = Feature{};
    }

    // Stores a unit of each token, normalised.
    __device__ __forceinline__ void store_unit(Feature* to, const uint4 (&loaded)[TOKENS], const uint4& weight,
                                               const float (&scales)[TOKENS]) const {
        const SCALAR* weights = reinterpret_cast<const SCALAR*>(&weight);
        alignas(16) Feature unit[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) {
                const float value = to_float(reinterpret_cast<const SCALAR*>(&loaded[token])[i]);
                set(unit[i].values[token], rounded(to_float(weights[i]) * rounded(value * scales[token])));
            }
        }
        constexpr int kUnits16 = sizeof(unit) / 16;
#pragma unroll
        for (int i = 0; i < kUnits16; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(unit)[i];
    }

    static __device__ __forceinline__ void set(float& to, float value) { to = value; }
    static __device__ __forceinline__ void set(__half& to, float value) { store(&to, value); }
    static __device__ __forceinline__ void set(__nv_bfloat16& to, float value) { store(&to, value); }
};

// The segments' partial sums in shared memory.
struct Partials {
    const Sums* partial;
    const int* first_rows;
    int span;

    // Adds those of row `row` of the panel, in every lane of the warp.
    __device__ __forceinline__ Sums of_row(int row) const {
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
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) sums.values[token] = warp_sum(sums.values[token]);
        return sums;
    }
};

// The outputs of a warp: rows warp, warp + 16, ... of the panel, or of its first half with SILU_MUL.
struct Outputs {
    const SCALAR* bias;
    SCALAR* y;
    int first, m, n, rows;  // rows: of y
    float early_residual;

    // Loads the residuals, lane 4 t + i that of token t and the warp's i-th row. Called after griddepcontrol.wait.
    __device__ __forceinline__ Outputs(const SCALAR* bias, const SCALAR* residual, SCALAR* y, int first, int m, int n)
        : bias(bias), y(y), first(first), m(m), n(n), rows(SILU_MUL ? n / 2 : n), early_residual(0) {
        if constexpr (ADD_RESIDUAL) {
            const int lane = threadIdx.x % kWarp, token = first + lane / 4, row = threadIdx.x / kWarp + lane % 4 * kSegments;
            const int number = row < kPanelRows ? row_of(blockIdx.x, row, n) : n;
            if (lane / 4 < TOKENS && token < m && number < n) early_residual = to_float(residual[(long long)token * n + number]);
        }
    }

    // Stores the outputs of the panel's row `row`. All lanes of the warp call it.
    __device__ __forceinline__ void put(const Partials& partials, int row) const {
        const int half = first_half_rows(blockIdx.x, n);
        const Sums sums = partials.of_row(row), up = SILU_MUL ? partials.of_row(row + half) : Sums{};
        const int number = row_of(blockIdx.x, row, n), lane = threadIdx.x % kWarp;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const float added = ADD_RESIDUAL ? __shfl_sync(kAllLanes, early_residual, 4 * token + row / kSegments) : 0.0f;
            if (lane != 0 || number >= rows || first + token >= m) continue;
            float sum = sums.values[token] + (bias ? to_float(bias[number]) : 0.0f);
            if (SILU_MUL) sum = silu_mul(sum, up.values[token] + (bias ? to_float(bias[rows + number]) : 0.0f));
            if (ADD_RESIDUAL) sum = added + rounded(sum);
            store(y + (long long)(first + token) * rows + number, sum);
        }
    }
};

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
    const SCALAR* x,            // [m, k]
    const uint4* values,        // [loads, 32], kVector values each
    const void* deltas,         // [loads, 32], kVector deltas each
    const INDEX* bases,         // [panels, segments, 32]
    const int* panel_loads,     // [panels + 1]
    const SCALAR* bias,         // [n] or null
    const SCALAR* norm_weight,  // [k], aligned to 16 bytes, with RMS_NORM
    const SCALAR* residual,     // [m, n] with ADD_RESIDUAL
    SCALAR* y,                  // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k,
    int span,                   // the most rows that one segment of a list covers
    float epsilon
) {
    extern __shared__ __align__(16) char shared[];  // x, partial sums, first rows, sums of squares, stages
    const int segment = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int lane_columns = (k + kWarp - 1) / kWarp;
    Feature* features = reinterpret_cast<Feature*>(shared);
    Sums* partial = reinterpret_cast<Sums*>(features + lane_columns * kWarp);
    int* first_rows = reinterpret_cast<int*>(partial + kThreads * span);
    float* squares = reinterpret_cast<float*>(first_rows + kThreads);

    // bases and panel_loads, which only this kernel reads, are prefetched to L2 before griddepcontrol.wait.
    const int own_base = blockIdx.x * kThreads + threadIdx.x, first = blockIdx.y * TOKENS;
    if constexpr (!kFused) {
        if (lane % (32 / sizeof(INDEX)) == 0) prefetch_global_L2(bases + own_base);
        if (threadIdx.x == 0) prefetch_global_L2(panel_loads + blockIdx.x);
        for (int at = threadIdx.x; at < kThreads * span; at += kThreads) partial[at] = Sums{};
        griddepcontrol_wait();
    }
    const int base = bases[own_base];
    const int start = panel_loads[blockIdx.x], loads = panel_loads[blockIdx.x + 1] - start;
    const int begin = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - begin;
    // Requested after the weight, x would arrive after it.
    if constexpr (!kFused) stage_x(features, x, first, m, k, lane_columns * kWarp);
    const List list(values, deltas, (long long)(start + begin) * kWarp + lane);
#if TOKENS < 4
    SharedStages<kThreads> stages(reinterpret_cast<const char*>(squares + (RMS_NORM ? kSegments * TOKENS : 0)));
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
    if constexpr (kFused) {
        for (int at = threadIdx.x; at < kThreads * span; at += kThreads) partial[at] = Sums{};
        if constexpr (RMS_NORM) {
            const NormStage norm(norm_weight, k);
            griddepcontrol_wait();
            norm.copy(features, x, first, m, k, lane_columns * kWarp, epsilon, squares);
        } else {
            griddepcontrol_wait();
            stage_x(features, x, first, m, k, lane_columns * kWarp);
        }
    }
    const Outputs outputs(bias, residual, y, first, m, n);
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
    const Partials partials{partial, first_rows, span};
    for (int number = segment; number < kOutputs; number += kSegments) outputs.put(partials, number);
}
