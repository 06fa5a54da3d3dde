// Attention of single query tokens over the KV cache: out[m, head, :] = softmax(q . keys * scale) . values over positions 0 to
// positions[m].
//
// A CTA computes GROUP query heads that share a key-value head, for one token and one of `splits` ranges of its positions. A
// team of kLanes lanes takes one position at a time, 8 values per lane, and keeps its own maximum, sum and weighted values
// (online softmax). The teams of a CTA are combined by shuffles and in shared memory. With several splits, partial results go
// to global memory; the last CTA of a token and group combines them in a fixed order, so every run gives the same bits, and
// sets the counter back to 0.
//
// With ROPE a row of q holds a token's queries, keys and values, and the token is the only new one of its sequence: every CTA
// normalises (q_norm, k_norm; Qwen3) and rotates its queries. The CTAs of the last split do the same with the token's own key,
// attend to it, and write key and value to the cache. Results are rounded where rope.cu rounds them.
//
// PDL: with ROPE the positions, the rotary table and the first keys and values are read before griddepcontrol.wait. They were
// written before the step's first kernel, which is launched without PDL and so waits for all kernels before it.
//
// Grid: (key-value heads * groups of GROUP query heads, splits, tokens). CTA: 4 warps. Bound: latency for short contexts of few
// tokens, else reading the cache.
//
// Compiled with SCALAR, DIM (head dimension: a multiple of 8, with ROPE of 16), GROUP (query heads per CTA), ROPE (0 or 1).

#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

constexpr int kWarps = 4;
constexpr int kVector = 8;                                        // values per lane
constexpr int kNeeded = DIM / kVector;                            // lanes that have values of a position
constexpr int kLanes = kNeeded <= 1 ? 1 : kNeeded <= 2 ? 2 : kNeeded <= 4 ? 4 : kNeeded <= 8 ? 8 : kNeeded <= 16 ? 16 : 32;
constexpr int kTeams = 32 / kLanes;                               // positions that a warp takes at a time
constexpr int kAhead = GROUP > 2 ? 2 : GROUP == 2 ? 4 : 8;         // positions per team whose loads are in flight
constexpr int kPartial = DIM + 4;                                 // floats of a partial result in memory; a multiple of 4
constexpr int kSplitsAhead = 4;                                   // partial results per warp whose loads are in flight
static_assert(DIM % kVector == 0 && kNeeded <= 32, "DIM is a multiple of 8, up to 256");

// A lane's values of a position, not yet converted: 16 or 32 bytes.
struct Loaded {
    uint4 units[sizeof(SCALAR) / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(SCALAR)) / 2; ++i) units[i] = uint4{0, 0, 0, 0};
    }

    __device__ __forceinline__ void read(const SCALAR* from) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(SCALAR)) / 2; ++i) units[i] = reinterpret_cast<const uint4*>(from)[i];
    }

    __device__ __forceinline__ void widen(float (&to)[kVector]) const {
        const SCALAR* values = reinterpret_cast<const SCALAR*>(units);
#pragma unroll
        for (int i = 0; i < kVector; ++i) to[i] = to_float(values[i]);
    }
};

// The running softmax of one head: values weighted by exp(score - maximum), and the sum of these weights.
struct Softmax {
    float maximum, sum;
    float values[kVector];

    __device__ __forceinline__ void clear() {
        maximum = -kFloatMax, sum = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = 0;
    }

    // Raises the maximum to at least `largest`.
    __device__ __forceinline__ void raise(float largest) {
        const float raised = fmaxf(maximum, largest), keep = expf(maximum - raised);
        maximum = raised, sum *= keep;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] *= keep;
    }

    // Adds a position whose score is no larger than the maximum.
    __device__ __forceinline__ void add(float score, const float (&added)[kVector]) {
        const float weight = expf(score - maximum);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] += weight * added[i];
    }

    // Merges another running softmax; either may be empty.
    __device__ __forceinline__ void merge(float other_maximum, float other_sum, const float* added) {
        const float largest = fmaxf(maximum, other_maximum);
        const float keep = expf(maximum - largest), weight = expf(other_maximum - largest);
        maximum = largest, sum = sum * keep + other_sum * weight;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = values[i] * keep + weight * added[i];
    }
};

struct Partial {
    float maximum, sum;
    float values[DIM];
};

__device__ __forceinline__ float rounded(float value) {
    SCALAR result;
    store(&result, value);
    return to_float(result);
}

// Sums over the lanes of a team.
__device__ __forceinline__ float team_sum(float value) {
#pragma unroll
    for (int step = kLanes / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// The rotary embedding at a position, for a lane's values and the values DIM / 2 before or after them.
struct Rotation {
    int column, other_column;
    float cosines[kVector], sines[kVector];

    __device__ __forceinline__ Rotation(const SCALAR* all_cosines, const SCALAR* all_sines, int position, int part) {
        column = part * kVector, other_column = column < DIM / 2 ? column + DIM / 2 : column - DIM / 2;
        const long long at = static_cast<long long>(position) * (DIM / 2) + min(column, other_column);
        Loaded loaded;
        loaded.read(all_cosines + at), loaded.widen(cosines);
        loaded.read(all_sines + at), loaded.widen(sines);
    }

    // Loads the lane's values of a head, and those that they are rotated with.
    __device__ __forceinline__ void load(Loaded (&loaded)[2], const SCALAR* head) const {
        loaded[0].read(head + column), loaded[1].read(head + other_column);
    }

    // Normalises the lane's values of a loaded head, if `norm` is not null, and rotates them. All lanes of the warp call it.
    __device__ __forceinline__ void rotate(float (&own)[kVector], const Loaded (&loaded)[2], const SCALAR* norm, float epsilon,
                                           bool has_values) const {
        float other[kVector];
        loaded[0].widen(own), loaded[1].widen(other);
        if (norm) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i) squares += has_values ? own[i] * own[i] : 0;
            const float scale = rsqrtf(team_sum(squares) / DIM + epsilon);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                own[i] = rounded(to_float(norm[column + i]) * rounded(own[i] * scale));
                other[i] = rounded(to_float(norm[other_column + i]) * rounded(other[i] * scale));
            }
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float crossed = rounded(other[i] * sines[i]);
            own[i] = rounded(rounded(own[i] * cosines[i]) + (column < DIM / 2 ? -crossed : crossed));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kWarps * 32, GROUP > 4 ? 2 : 3) semisparse_engine_attention(
    const SCALAR* q,        // [m, heads, DIM]; with ROPE [m, stride]
    const SCALAR* q_norm,   // [DIM] or null
    const SCALAR* k_norm,   // [DIM] or null
    const SCALAR* cosines,  // [length, DIM / 2] with ROPE
    const SCALAR* sines,    // [length, DIM / 2] with ROPE
    SCALAR* keys,           // [sequences, kv_heads, length, DIM]
    SCALAR* values,         // [sequences, kv_heads, length, DIM]
    const int* positions,   // [m]: the token's position, the last that it attends to
    SCALAR* out,            // [m, heads, DIM]
    float* partials,        // [m, heads, splits, kPartial]: weighted values, maximum, sum
    int* counters,          // [m, kv_heads * groups]: CTAs that have stored partials; 0 between launches
    int heads, int kv_heads, int tokens, int length, int splits, int stride, int q_start, int k_start, int v_start,
    float scale, float epsilon
) {
    __shared__ Partial warp_partials[kWarps][GROUP];
    __shared__ int last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp * kTeams + lane / kLanes, part = lane % kLanes;
    const int per_kv = heads / kv_heads, groups = (per_kv + GROUP - 1) / GROUP;
    const int kv_head = blockIdx.x / groups, first_head = kv_head * per_kv + blockIdx.x % groups * GROUP;
    const int count = min(GROUP, kv_head * per_kv + per_kv - first_head), row = blockIdx.z, split = blockIdx.y;
    const bool has_values = part < kNeeded;
    griddepcontrol_launch_dependents();
    if (!ROPE) griddepcontrol_wait();
    const int position = positions[row], context = ROPE ? position : position + 1;  // in the cache
    const int begin = static_cast<int>(static_cast<long long>(context) * split / splits);
    const int end = static_cast<int>(static_cast<long long>(context) * (split + 1) / splits);
    const long long base = (static_cast<long long>(row / tokens) * kv_heads + kv_head) * length * DIM + part * kVector;
    constexpr int kStep = kWarps * kTeams;
    Loaded key[kAhead], value[kAhead];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int at = first + i * kStep;
            key[i].clear(), value[i].clear();
            if (at < end && has_values) {
                key[i].read(keys + base + static_cast<long long>(at) * DIM);
                value[i].read(values + base + static_cast<long long>(at) * DIM);
            }
        }
    };
    load(begin + team);
    float query[GROUP][kVector];
    Softmax softmax[GROUP];
#pragma unroll
    for (int head = 0; head < GROUP; ++head) softmax[head].clear();
    if constexpr (ROPE) {
        const Rotation rotation(cosines, sines, position, has_values ? part : 0);
        griddepcontrol_wait();
        const SCALAR* token = q + static_cast<long long>(row) * stride;
        const bool takes_new = split == splits - 1 && warp == 0;
        Loaded loaded[2], loaded_key[2], loaded_value;
        if (takes_new) {  // loaded with the queries, not after them
            rotation.load(loaded_key, token + k_start + kv_head * DIM);
            loaded_value.read(token + v_start + kv_head * DIM + rotation.column);
        }
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            rotation.load(loaded, token + q_start + (first_head + min(head, count - 1)) * DIM);
            rotation.rotate(query[head], loaded, q_norm, epsilon, has_values);
        }
        if (takes_new) {
            float new_key[kVector], new_value[kVector];
            loaded_value.widen(new_value);
            rotation.rotate(new_key, loaded_key, k_norm, epsilon, has_values);
            if (team == 0 && has_values && blockIdx.x % groups == 0) {
                const long long start = base + static_cast<long long>(position) * DIM;
#pragma unroll
                for (int i = 0; i < kVector; ++i) store(keys + start + i, new_key[i]), store(values + start + i, new_value[i]);
            }
#pragma unroll
            for (int head = 0; head < GROUP; ++head) {
                float score = 0;
#pragma unroll
                for (int j = 0; j < kVector; ++j) score += has_values ? query[head][j] * new_key[j] : 0;
                score = team_sum(score) * scale;
                if (team == 0) softmax[head].raise(score), softmax[head].add(score, new_value);
            }
        }
    } else {
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            Loaded loaded;
            loaded.clear();
            if (has_values && head < count)
                loaded.read(q + (static_cast<long long>(row) * heads + first_head + head) * DIM + part * kVector);
            loaded.widen(query[head]);
        }
    }
    for (int first = begin + team; first - team < end; first += kAhead * kStep) {
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            float scores[kAhead], largest = -kFloatMax;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                float of_key[kVector];
                key[i].widen(of_key);
                scores[i] = 0;
#pragma unroll
                for (int j = 0; j < kVector; ++j) scores[i] += query[head][j] * of_key[j];
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                scores[i] = team_sum(scores[i]) * scale;
                if (first + i * kStep < end) largest = fmaxf(largest, scores[i]);
            }
            softmax[head].raise(largest);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                float of_value[kVector];
                value[i].widen(of_value);
                if (first + i * kStep < end) softmax[head].add(scores[i], of_value);
            }
        }
        load(first + kAhead * kStep);
    }
    // Merge the teams of a warp, then the CTA's warps, then the splits.
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
#pragma unroll
        for (int step = 16; step >= kLanes; step /= 2) {
            float other[kVector];
            const float maximum = __shfl_xor_sync(~0u, softmax[head].maximum, step);
            const float sum = __shfl_xor_sync(~0u, softmax[head].sum, step);
#pragma unroll
            for (int i = 0; i < kVector; ++i) other[i] = __shfl_xor_sync(~0u, softmax[head].values[i], step);
            softmax[head].merge(maximum, sum, other);
        }
        if (lane < kNeeded) {
            Partial& mine = warp_partials[warp][head];
            if (lane == 0) mine.maximum = softmax[head].maximum, mine.sum = softmax[head].sum;
#pragma unroll
            for (int i = 0; i < kVector; ++i) mine.values[lane * kVector + i] = softmax[head].values[i];
        }
    }
    __syncthreads();
    // From here on a warp computes a head: lane l has its values 8 l to 8 l + 7.
    auto finish = [&](int head, const Softmax& total) {
        const long long start = (static_cast<long long>(row) * heads + first_head + head) * DIM + lane * kVector;
        if (lane < kNeeded)
#pragma unroll
            for (int i = 0; i < kVector; ++i) store(out + start + i, total.values[i] / total.sum);
    };
    auto partial_at = [&](int head, int of) {
        return partials + ((static_cast<long long>(row) * heads + first_head + head) * splits + of) * kPartial;
    };
    const int unit = min(lane, kNeeded - 1) * kVector;
    auto merged_warps = [&](int head) {
        Softmax total;
        total.clear();
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const Partial& from = warp_partials[other][head];
            total.merge(from.maximum, from.sum, from.values + unit);
        }
        return total;
    };
    for (int head = warp; head < count; head += kWarps) {
        const Softmax total = merged_warps(head);
        if (splits == 1) {
            finish(head, total);
        } else {
            float* to = partial_at(head, split);
            if (lane == 0) to[DIM] = total.maximum, to[DIM + 1] = total.sum;
            if (lane < kNeeded) {
                float4* units = reinterpret_cast<float4*>(to + unit);
                units[0] = float4{total.values[0], total.values[1], total.values[2], total.values[3]};
                units[1] = float4{total.values[4], total.values[5], total.values[6], total.values[7]};
            }
        }
    }
    if (splits == 1) return;
    __syncthreads();
    int* counter = counters + row * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) last = atom_acq_rel_gpu_increment(counter) == splits - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *counter = 0;
    // Each warp merges every fourth split, with several loads in flight; then the warps are merged as before.
    for (int head = 0; head < count; ++head) {
        Softmax total;
        total.clear();
        for (int first = warp; first < splits; first += kSplitsAhead * kWarps) {
            float4 low[kSplitsAhead], high[kSplitsAhead];
            float2 of_split[kSplitsAhead];
#pragma unroll
            for (int i = 0; i < kSplitsAhead; ++i) {
                const float* from = partial_at(head, min(first + i * kWarps, splits - 1));
                low[i] = __ldcg(reinterpret_cast<const float4*>(from + unit));
                high[i] = __ldcg(reinterpret_cast<const float4*>(from + unit) + 1);
                of_split[i] = __ldcg(reinterpret_cast<const float2*>(from + DIM));
            }
#pragma unroll
            for (int i = 0; i < kSplitsAhead; ++i) {
                const float other[kVector] = {low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w};
                if (first + i * kWarps < splits) total.merge(of_split[i].x, of_split[i].y, other);
            }
        }
        Partial& mine = warp_partials[warp][head];
        if (lane == 0) mine.maximum = total.maximum, mine.sum = total.sum;
        if (lane < kNeeded)
#pragma unroll
            for (int i = 0; i < kVector; ++i) mine.values[unit + i] = total.values[i];
    }
    __syncthreads();
    for (int head = warp; head < count; head += kWarps) finish(head, merged_warps(head));
}
