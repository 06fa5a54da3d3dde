// y[m, n] = sum_k x[m, k] * w[n, k] for an ec_csr weight in the layout `banks`, TOKENS tokens at a time.
//
// A thread block computes the rows of a panel. x lies in shared memory, the tokens of a column side by side. Lane l has
// the columns l, l + 32, ...: no two lanes of a warp ever ask one bank for different words. A lane's list runs through the
// rows of the panel and is cut into segments, one for each warp. A segment's sum of each row that a lane meets in it goes
// to a place of its own; the places of a row are added in a fixed order: every run gives the same bits.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float: x, w, bias and y), TOKENS, DELTA_BITS (4 or 8), INDEX (unsigned
// short or unsigned int, of bases), PANEL_ROWS (at most 64), AHEAD (ring.cuh) and BLOCKS (that shall
// fit a processor).

#include "ptx/griddepcontrol.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global.cuh"
#include "ring.cuh"
#include "scalar.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = kSegments * kWarp;

// One token is widened once, on its way to shared memory; more keep their width, to fit.
#if TOKENS == 1
struct Feature {
    float values[1];
};
#else
struct alignas(TOKENS * sizeof(SCALAR) < 16 ? TOKENS * sizeof(SCALAR) : 16) Feature {
    SCALAR values[TOKENS];
};
#endif

// A lane's place in x is counted in 128ths of the way to its next column: bytes for one token, and dp4a can scale a delta.
constexpr int kStride = 128;
constexpr int kBytes = kWarp * sizeof(Feature) / kStride;  // of a place's unit
static_assert(kBytes * kStride == kWarp * sizeof(Feature), "whole bytes");

struct Sums {
    float values[TOKENS];
};

// The number that the low bits are.
__device__ __forceinline__ SCALAR of_bits(Word word) { return *reinterpret_cast<const SCALAR*>(&word); }

// Writes x, and zeros from column k to the lanes' last ones. Tokens past m repeat the last one and are not stored.
__device__ __forceinline__ void stage(Feature* features, const SCALAR* x, int first, int m, int k, int columns) {
    const SCALAR* rows[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) rows[token] = x + (long long)min(first + token, m - 1) * k;
    int done = 0;
#if TOKENS == 1
    if (k % kVector == 0 && reinterpret_cast<unsigned long long>(rows[0]) % 16 == 0) {
        for (int at = threadIdx.x; at < k / kVector; at += kThreads) {
            const uint4 bits = __ldg(reinterpret_cast<const uint4*>(rows[0]) + at);
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
                pair[0].values[token] = of_bits(both);
                pair[1].values[token] = of_bits(both >> 16);
            }
            features[column] = pair[0];
            features[column + 1] = pair[1];
        }
        return;
    }
#endif
    for (int column = done + threadIdx.x; column < columns; column += kThreads) {
        Feature found;
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
#if TOKENS == 1
            found.values[token] = column < k ? to_float(rows[token][column]) : 0.0f;
#else
            found.values[token] = column < k ? rows[token][column] : SCALAR(0.0f);
#endif
        }
        features[column] = found;
    }
}

// Adds what the segments found for row `row` of the panel, and stores its outputs.
__device__ __forceinline__ void add_row(
    const Sums* found, const int* first_rows, int span, const SCALAR* bias, SCALAR* y, int row, int first, int m, int n
) {
    const int lane = threadIdx.x % kWarp;
    Sums sums = {};
    // Without branches, so that one segment's reads do not wait for another's.
#pragma unroll (TOKENS < 4 ? 8 : 4)
    for (int segment = 0; segment < kSegments; ++segment) {
        const Word at = row - first_rows[segment * kWarp + lane];
        const Sums part = found[(segment * span + min(at, static_cast<Word>(span) - 1)) * kWarp + lane];
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) sums.values[token] += at < span ? part.values[token] : 0.0f;
    }
    const int number = blockIdx.x * kPanelRows + row;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        float sum = sums.values[token];
#pragma unroll
        for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (lane == 0 && number < n && first + token < m) {
            store(y + (long long)(first + token) * n + number, sum + (bias ? to_float(bias[number]) : 0.0f));
        }
    }
}

// What a lane knows while it walks its list.
struct Walk {
    const char* features;
    int place, end;  // end: of a row
    Sums* here;
    Sums sums;

    // Reads all it needs of x before it writes any sum: otherwise each read would wait for the sums before it.
    __device__ __forceinline__ void use(const Load& now) {
        const Places<kStride> places(now.deltas);
        const Word words[4] = {now.values.x, now.values.y, now.values.z, now.values.w};
        Feature found[kVector];
        bool ended[kVector / kRun];
#pragma unroll
        for (int step = 0; step < kVector; ++step) {
            int at = places.after(place, step);
            if (step % kRun == 0) {
                const int passed = at >= end ? end : 0;
                ended[step / kRun] = passed;
                at -= passed;
                place -= passed;
            }
            found[step] = *reinterpret_cast<const Feature*>(features + at * kBytes);
            if (places.starts_anew(step)) place = at;
        }
#pragma unroll
        for (int step = 0; step < kVector; ++step) {
            if (step % kRun == 0 && ended[step / kRun]) {
                *here = sums;
                here += kWarp;
                sums = Sums{};
            }
            const float weight = scalar_of(words, step);
#pragma unroll
            for (int token = 0; token < TOKENS; ++token) sums.values[token] += weight * to_float(found[step].values[token]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_ec_csr_banks(
    const SCALAR* x,        // [m, k]
    const uint4* values,    // [loads, 32], kVector values each
    const void* deltas,     // [loads, 32], kVector deltas each
    const INDEX* bases,     // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    const SCALAR* bias,     // [n] or null
    SCALAR* y,              // [m, n]
    int m, int n, int k, int span         // span: rows that a lane meets in a segment, at most
) {
    extern __shared__ __align__(16) char shared[];  // x, sums [segments, span, 32], first rows [segments, 32], ring
    const int segment = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int height = (k + kWarp - 1) / kWarp;
    Feature* features = reinterpret_cast<Feature*>(shared);
    Sums* found = reinterpret_cast<Sums*>(features + height * kWarp);
    int* first_rows = reinterpret_cast<int*>(found + kThreads * span);

    // What nobody has read since the last product: L2 brings it while the kernel before ends.
    const int own_base = blockIdx.x * kThreads + threadIdx.x;
    if (lane % (32 / sizeof(INDEX)) == 0) prefetch_global_L2(bases + own_base);
    if (threadIdx.x == 0) prefetch_global_L2(panel_loads + blockIdx.x);
    for (int at = threadIdx.x; at < kThreads * span; at += kThreads) found[at] = Sums{};
    griddepcontrol_wait();
    const int base = bases[own_base];
    const int start = panel_loads[blockIdx.x], loads = panel_loads[blockIdx.x + 1] - start;
    const int begin = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - begin;
    const int first = blockIdx.y * TOKENS;
    stage(features, x, first, m, k, height * kWarp);  // behind the weight it would come last
    const List own(values, deltas, (long long)(start + begin) * kWarp + lane);
#if TOKENS < 4
    Ring<kThreads> ring(reinterpret_cast<const char*>(first_rows + kThreads));
#else
    Held ring;
#endif
#pragma unroll
    for (int at = 0; at < AHEAD; ++at) {
        if (at < count) ring.ask(own, at, at);
        cp_async_commit_group();
    }
    griddepcontrol_launch_dependents();
    const int row = base / height;
    first_rows[threadIdx.x] = row;
    __syncthreads();

    Walk walk{shared, (base - row * height) * kStride + lane * (kStride / kWarp), height * kStride, found + segment * span * kWarp + lane, {}};
    for (int done = 0; done < count; done += AHEAD) {
        const List next(own.values + done * kWarp, own.deltas + done * (kWarp * kDeltaBytes), AHEAD * kWarp);
#pragma unroll
        for (int at = 0; at < AHEAD; ++at) {
            if (done + at >= count) break;
            const Load now = ring.take(at);
            if (done + at + AHEAD < count) ring.ask(next, at, at);
            cp_async_commit_group();
            walk.use(now);
        }
    }
    *walk.here = walk.sums;
    __syncthreads();
    for (int number = segment; number < kPanelRows; number += kSegments) {
        add_row(found, first_rows, span, bias, y, number, first, m, n);
    }
}
