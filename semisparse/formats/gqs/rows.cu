// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight in the layout `rows`, with groups of 16 in 4 or 8 bits, and m of 1 to TOKENS.
//
// A step is up to 32 groups of a row, one a lane: no lane has a dropped group. A lane's group is a part of the left operand
// of mma.m16n8k16, and the columns of x that go with it the same part of the right one, so four products multiply the
// groups of lanes 4 g to 4 g + 3 into place (g, g) of the sums, exactly and in float32. The sum of these eight places is the
// row's; what stands in the others is of no use.
//
// Stream-K over the steps of all rows, as in decode.cu: rows that lie in a warp's run whole are written by it, the shares of
// others are added in the order of the warps, then of the blocks.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, scale, bias and y), BITS (4 or 8), TOKENS (1, 2 or 4), WARPS (of a
// block), BATCH (steps that a warp loads at once) and BLOCKS (of a processor, for registers).

#include "dequantise.cuh"
#include "runs.cuh"

constexpr int kLanes = 32;

struct Weight {
    const int2* steps;           // [steps + 1]: row, and groups stored before
    const int* begins;           // [n + 1]: the first step of a row
    const Word* codes;           // [kept, kWords]
    const Word* heads;           // [kept]: scale, and 2^16 times the group's place in its row
    const unsigned char* zero;   // [kept]
    int kept;
};

// Lane i has step i of a batch; past the run's end, its end.
__device__ __forceinline__ int2 read_steps(const Weight& weight, int step, int end) {
    return __ldg(weight.steps + min(step + static_cast<int>(threadIdx.x) % kLanes, end));
}

struct Batch {
    Word codes[BATCH][kWords];
    Word head[BATCH], zero[BATCH];
    Word mine[BATCH];  // 0 where the lane has no group, else all ones
};

__device__ __forceinline__ void read_batch(Batch& batch, const Weight& weight, int2 steps) {
    int first = __shfl_sync(kAll, steps.y, 0);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const int next = __shfl_sync(kAll, steps.y, i + 1), group = first + static_cast<int>(threadIdx.x) % kLanes;
        // A lane without a group reads another's: no load waits for what another brought.
        const unsigned place = min(group, weight.kept - 1);
        batch.mine[i] = group < next ? ~0u : 0u;
#if BITS == 4
        const uint2 codes = __ldg(reinterpret_cast<const uint2*>(weight.codes) + place);
#else
        const uint4 codes = __ldg(reinterpret_cast<const uint4*>(weight.codes) + place);
        batch.codes[i][2] = codes.z;
        batch.codes[i][3] = codes.w;
#endif
        batch.codes[i][0] = codes.x;
        batch.codes[i][1] = codes.y;
        batch.head[i] = __ldg(weight.heads + place);
        batch.zero[i] = __ldg(weight.zero + place);
        first = next;
    }
}

// Where half 0 of a group's columns stands among the 16-byte units of a token, half 1 beside it: so that lanes whose groups
// follow each other meet in no bank.
__device__ __forceinline__ int unit_of(int group) { return 2 * group | (group >> 2 & 1); }

// Brings x to shared memory, zeros past k.
__device__ __forceinline__ void stage(uint4* staged, const SCALAR* x, int m, int k, int groups, bool vectors) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(x);
    for (int token = 0; token < m; ++token, bits += k, staged += 2 * groups) {
        for (int i = threadIdx.x; i < 2 * groups; i += kLanes * WARPS) {
            const int column = 8 * i;
            uint4 unit;
            if (vectors && column + 8 <= k) {
                unit = __ldg(reinterpret_cast<const uint4*>(bits + column));
            } else {
                Word pairs[4];
                for (int j = 0; j < 4; ++j) {
                    const int at = column + 2 * j;
                    pairs[j] = at < k ? __ldg(bits + at) : 0;
                    if (at + 1 < k) pairs[j] |= static_cast<Word>(__ldg(bits + at + 1)) << 16;
                }
                unit = {pairs[0], pairs[1], pairs[2], pairs[3]};
            }
            staged[unit_of(i / 2) ^ i % 2] = unit;
        }
    }
}

using Sums = float[TOKENS][4];

__device__ __forceinline__ void multiply_step(
    Sums& sums, const Batch& batch, int i, const uint4* staged, int m, int groups, const Constants& constants
) {
    const Word head = batch.head[i] & batch.mine[i];
    const uint4* unit = staged + unit_of(head >> 16);
    const uint4* other = staged + (unit_of(head >> 16) ^ 1);
    Word pairs[8];
    dequantise(pairs, batch.codes[i], __byte_perm(head, 0, 0x1010), batch.zero[i], constants);
    const SCALAR* tag = nullptr;
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        if (TOKENS > 1 && token >= m) break;
        const uint4 low = unit[token * 2 * groups], high = other[token * 2 * groups];
        const Word words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            Word rows[4] = {pairs[j], 0, pairs[j + 1], 0};
            leave_open(rows[1]);
            leave_open(rows[3]);
            mma(sums[token], rows, words[j], words[j + 1], tag);
        }
    }
}

// The sum of the places (g, g), in every lane: lane 4 g + t holds (g, 2 t) and (g, 2 t + 1).
__device__ __forceinline__ float trace(const float (&sums)[4]) {
    const int lane = threadIdx.x % kLanes;
    float total = lane % 4 != lane / 8 ? 0.0f : lane / 4 % 2 ? sums[1] : sums[0];
#pragma unroll
    for (int step = kLanes / 2; step; step /= 2) total += __shfl_xor_sync(kAll, total, step);
    return total;
}

struct Output {
    const SCALAR* __restrict__ bias;  // [n] or null
    SCALAR* __restrict__ y;           // [m, n]
    int m, n;

    __device__ __forceinline__ void write(int row, int token, float sum) const {
        store(y + static_cast<long long>(token) * n + row, sum + (bias ? to_float(bias[row]) : 0.0f));
    }
};

using Shares = float[2][TOKENS];  // of a row that began before, and of one that goes on after

// A warp's run of steps.
__device__ __forceinline__ void sum_run(
    Shares& shares, const Weight& weight, const Runs& runs, const uint4* staged, int2 now, Batch& batch, int groups,
    const Output& output
) {
    const int lane = threadIdx.x % kLanes;
    const int first = runs.begin + static_cast<int>(threadIdx.x) / kLanes * runs.run, end = min(first + runs.run, runs.end);
    if (first >= end) return;
    const Constants constants;
    int2 ahead = read_steps(weight, first + BATCH, end);
    bool begun_before = first > 0 && __ldg(weight.steps + first - 1).x == __shfl_sync(kAll, now.x, 0);
    Sums sums = {};
    for (int step = first; step < end; step += BATCH) {
        const int2 further = read_steps(weight, step + 2 * BATCH, end);
        Batch next;
        read_batch(next, weight, ahead);
        int row = __shfl_sync(kAll, now.x, 0);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            multiply_step(sums, batch, i, staged, output.m, groups, constants);
            const int row_after = __shfl_sync(kAll, now.x, i + 1);
            if (row_after != row) {
#pragma unroll
                for (int token = 0; token < TOKENS; ++token) {
                    const float total = trace(sums[token]);
                    if (lane == 0 && begun_before) shares[0][token] = total;
                    if (lane == 0 && !begun_before && token < output.m) output.write(row, token, total);
                    sums[token][0] = sums[token][1] = sums[token][2] = sums[token][3] = 0.0f;
                }
                begun_before = false;
                row = row_after;
            }
        }
        now = ahead;
        ahead = further;
        batch = next;
    }
    // Of a row that goes on, if any; else zeros that nobody reads.
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        const float total = trace(sums[token]);
        if (lane == 0) shares[!begun_before][token] = total;
    }
}

extern "C" __global__ void __launch_bounds__(kLanes * WARPS, BLOCKS) semisparse_gqs_rows(
    const SCALAR* __restrict__ x,             // [m, k]
    const int2* __restrict__ steps,           // [steps + 1]
    const int* __restrict__ begins,           // [n + 1]
    const Word* __restrict__ codes,           // [kept, kWords]
    const Word* __restrict__ heads,           // [kept]
    const unsigned char* __restrict__ zero,   // [kept]
    const SCALAR* __restrict__ bias,          // [n] or null
    SCALAR* __restrict__ y,                   // [m, n]
    float* __restrict__ parts,                // [blocks, 2, TOKENS]: a block's share of its first and of its last row
    int* __restrict__ arrivals,               // [n], zero before and after
    int m, int n, int k, int kept,
    int each, int more,                       // a block's steps, and how many blocks have one more
    int vectors                               // whether every row of x is 16-byte aligned
) {
    extern __shared__ uint4 shared[];  // shares by warp, then x
    Shares* shares = reinterpret_cast<Shares*>(shared);
    uint4* staged = shared + (WARPS * sizeof(Shares) + 15) / 16;
    const Weight weight = {steps, begins, codes, heads, zero, kept};
    const Output output = {bias, y, m, n};
    const Runs runs(each, more);
    const int groups = (k + kSize - 1) / kSize;
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int first_step = runs.begin + warp * runs.run;
    Batch batch;
    const int2 now = read_steps(weight, min(first_step, runs.end), min(first_step + runs.run, runs.end));
    read_batch(batch, weight, now);
    stage(staged, x, m, k, groups, vectors);
    __syncthreads();
    sum_run(shares[warp], weight, runs, staged, now, batch, groups, output);
    __syncthreads();
    // Each row with shares is finished by the warp that has the first of the block.
    const int end_step = min(first_step + runs.run, runs.end);
    if (first_step >= end_step) return;
    for (int slot = warp == 0 ? 0 : 1; slot < 2; ++slot) {
        const int row = __ldg(weight.steps + (slot ? end_step - 1 : first_step)).x;
        const int begin = __ldg(begins + row), end = __ldg(begins + row + 1);
        const bool begins_here = begin >= first_step;
        // Slot 0 is a row that began before the block, slot 1 one that began in this run and goes on.
        if (slot ? !begins_here || end <= end_step : begins_here) continue;
        const int to = min(end, runs.end), last = (to - 1 - runs.begin) / runs.run;
        float total = 0.0f;
        if (lane < m) {
            total = shares[warp][slot][lane];
            for (int i = warp + 1; i <= last; ++i) total += shares[i][0][lane];
        }
        if (begins_here && to == end) {
            if (lane < m) output.write(row, lane, total);
            continue;
        }
        if (lane < m) parts[(2ll * blockIdx.x + slot) * TOKENS + lane] = total;
        const int from_block = runs.block_of(begin), to_block = runs.block_of(end - 1);
        if (!is_last(arrivals + row, to_block - from_block) || lane >= m) continue;
        total = 0.0f;
        for (int block = from_block; block <= to_block; ++block) {
            total += __ldcg(parts + (2ll * block + (block == from_block)) * TOKENS + lane);
        }
        output.write(row, lane, total);
    }
}
