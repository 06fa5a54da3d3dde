// Attention of single query tokens over the KV cache: out[m, head, :] = softmax(q . keys * scale) . values over positions 0 to
// positions[m].
//
// A CTA computes GROUP query heads that share a key-value head, for one token and one of `splits` ranges of its positions. A
// team of kLanes lanes takes one position at a time, 8 values per lane, and keeps its own maximum, sum and weighted values
// (online softmax). The teams of a CTA are combined by shuffles and in shared memory, then the splits, in a fixed order, so
// every run gives the same bits. If the splits are a cluster (CLUSTER > 1), its CTAs store partial results in the shared memory
// of rank 0 (st.async), which waits for their bytes on an mbarrier. Else partial results go to global memory; the last CTA of a
// token and group combines them and sets the counter back to 0.
//
// With ROPE a row of q holds a token's queries, keys and values, and the token is the only new one of its sequence: every CTA
// normalises (q_norm, k_norm; Qwen3) and rotates its queries. The CTAs of the last split do the same with the token's own key,
// attend to it, and write key and value to the cache. Results are rounded where rope.cu rounds them.
//
// With PAGE the cache is in pages of PAGE positions, as serving engines keep it, and pages[row] has the numbers of a sequence's
// pages. The token's own key and value are in tensors of their own, rotated already. The CTAs of the last split attend to them,
// too, and write them to the cache: at slots[row], nowhere if that is negative. A sequence of no positions, as a captured graph
// pads with, gets zeros. Such a kernel is launched without PDL, and lets no other start before it ends: the kernels around it are
// not ours.
//
// PDL: with ROPE the positions, the rotary table and the first keys and values are read before griddepcontrol.wait. They were
// written before the step's first kernel, which is launched without PDL and so waits for all kernels before it.
//
// Grid: (splits, key-value heads * groups of GROUP query heads, tokens). CTA: WARPS warps. Bound: latency for short contexts of
// few tokens, else reading the cache.
//
// Compiled with SCALAR, DIM (head dimension: a multiple of 8, with ROPE of 16), GROUP (query heads per CTA), ROPE (0 or 1), WARPS,
// AHEAD, CTAS (per SM), CLUSTER (1, or the number of splits; Hopper and later), PAGE (positions of a page; 0: the cache has none).

#include "ptx/cluster.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/st_async.cuh"
#include "types.cuh"

constexpr int kWarps = WARPS;
constexpr int kThreads = kWarps * 32;
constexpr int kVector = 8;                                        // values per lane
constexpr int kNeeded = DIM / kVector;                            // lanes that have values of a position
constexpr int kLanes = kNeeded <= 1 ? 1 : kNeeded <= 2 ? 2 : kNeeded <= 4 ? 4 : kNeeded <= 8 ? 8 : kNeeded <= 16 ? 16 : 32;
constexpr int kTeams = 32 / kLanes;                               // positions that a warp takes at a time
constexpr int kAhead = AHEAD;                                      // positions per team whose loads are in flight
constexpr float kLog2E = 1.4426950408889634f;
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

    __device__ __forceinline__ void write(SCALAR* to) const {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(SCALAR)) / 2; ++i) reinterpret_cast<uint4*>(to)[i] = units[i];
    }

    __device__ __forceinline__ void widen(float (&to)[kVector]) const {
        const SCALAR* values = reinterpret_cast<const SCALAR*>(units);
#pragma unroll
        for (int i = 0; i < kVector; ++i) to[i] = to_float(values[i]);
    }
};

// The running softmax of one head: values weighted by 2 ** (score - maximum), and the sum of these weights. Scores are divided
// by log(2): exp2f takes fewer instructions than expf.
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
        const float raised = fmaxf(maximum, largest), keep = exp2f(maximum - raised);
        maximum = raised, sum *= keep;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] *= keep;
    }

    // Adds a position whose score is no larger than the maximum.
    __device__ __forceinline__ void add(float score, const float (&added)[kVector]) {
        const float weight = exp2f(score - maximum);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] += weight * added[i];
    }

    // Merges another running softmax; either may be empty.
    __device__ __forceinline__ void merge(float other_maximum, float other_sum, const float* added) {
        const float largest = fmaxf(maximum, other_maximum);
        const float keep = exp2f(maximum - largest), weight = exp2f(other_maximum - largest);
        maximum = largest, sum = sum * keep + other_sum * weight;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = values[i] * keep + weight * added[i];
    }
};

// A head's partial result.
struct alignas(16) Partial {
    float values[DIM];
    float maximum, sum;
    float unused[2];
};

// One value of merged partial results.
struct Merged {
    float maximum, sum, value;
};

// Merges value `column` of `count` partial results that are `stride` apart. `load` reads a float.
template <class Load>
__device__ __forceinline__ Merged merged(const Partial* partials, int stride, int count, int column, Load load) {
    Merged total{-kFloatMax, 0, 0};
#pragma unroll 8
    for (int i = 0; i < count; ++i) total.maximum = fmaxf(total.maximum, load(&partials[i * stride].maximum));
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const Partial& from = partials[i * stride];
        const float weight = exp2f(load(&from.maximum) - total.maximum);
        total.sum += weight * load(&from.sum);
        total.value += weight * load(&from.values[column]);
    }
    return total;
}

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

#if PAGE
extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(kThreads, CTAS) semisparse_engine_paged_attention(
    const SCALAR* q,        // [m, heads, DIM], rows `stride` apart
    const SCALAR* new_keys, // [m, kv_heads, DIM], rows `key_stride` apart
    const SCALAR* new_values,  // the same, rows `value_stride` apart
    SCALAR* keys,           // pages of PAGE positions, [kv_heads, DIM] each; distances in values below
    SCALAR* values,         // the same
    const int* lengths,     // [m]: positions of the sequence, the token's own included
    const int* pages,       // [m, page_numbers]
    const long long* slots,  // [m]: where the token's own position is in the cache, counted over all pages; -1: nowhere
    SCALAR* out,            // [m, heads, DIM]
    Partial* partials,      // [m, heads, splits]; unused in a cluster
    int* counters,          // [m, kv_heads * groups]: CTAs that have stored partials; 0 between launches
    int heads, int kv_heads, int page_numbers, int splits, int stride, int key_stride, int value_stride, int page_stride,
    int position_stride, int head_stride, float scale
) {
#else
extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(kThreads, CTAS) semisparse_engine_attention(
    const SCALAR* q,        // [m, heads, DIM]; with ROPE [m, stride]
    const SCALAR* q_norm,   // [DIM] or null
    const SCALAR* k_norm,   // [DIM] or null
    const SCALAR* cosines,  // [length, DIM / 2] with ROPE
    const SCALAR* sines,    // [length, DIM / 2] with ROPE
    SCALAR* keys,           // [sequences, kv_heads, length, DIM]
    SCALAR* values,         // [sequences, kv_heads, length, DIM]
    const int* positions,   // [m]: the token's position, the last that it attends to
    SCALAR* out,            // [m, heads, DIM]
    Partial* partials,      // [m, heads, splits]; unused in a cluster
    int* counters,          // [m, kv_heads * groups]: CTAs that have stored partials; 0 between launches
    int heads, int kv_heads, int tokens, int length, int splits, int stride, int q_start, int k_start, int v_start,
    float scale, float epsilon
) {
#endif
    __shared__ Partial warp_partials[kWarps][GROUP];
    __shared__ int last;
    __shared__ Partial split_partials[CLUSTER][GROUP];  // in rank 0 of a cluster
    __shared__ __align__(8) Long arrived;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp * kTeams + lane / kLanes, part = lane % kLanes;
    const int per_kv = heads / kv_heads, groups = (per_kv + GROUP - 1) / GROUP;
    const int kv_head = blockIdx.y / groups, first_head = kv_head * per_kv + blockIdx.y % groups * GROUP;
    const int count = min(GROUP, kv_head * per_kv + per_kv - first_head), row = blockIdx.z, split = blockIdx.x;
    const bool has_values = part < kNeeded;
    if (!PAGE) griddepcontrol_launch_dependents();
    if (!ROPE) griddepcontrol_wait();
#if PAGE
    const int length = lengths[row], context = max(length - 1, 0);  // in the cache
#else
    const int position = positions[row], context = ROPE ? position : position + 1;  // in the cache
#endif
    const int begin = static_cast<int>(static_cast<long long>(context) * split / splits);
    const int end = static_cast<int>(static_cast<long long>(context) * (split + 1) / splits);
#if PAGE
    const int* of_sequence = pages + static_cast<long long>(row) * page_numbers;
    auto in_page = [&](long long page, int at) {
        return page * page_stride + static_cast<long long>(at) * position_stride + kv_head * head_stride + part * kVector;
    };
    auto offset = [&](int at) { return in_page(of_sequence[at / PAGE], at % PAGE); };
#else
    const long long base = (static_cast<long long>(row / tokens) * kv_heads + kv_head) * length * DIM + part * kVector;
    auto offset = [&](int at) { return base + static_cast<long long>(at) * DIM; };
#endif
    constexpr int kStep = kWarps * kTeams;
    Loaded key[kAhead], value[kAhead];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int at = first + i * kStep;
            key[i].clear(), value[i].clear();
            if (at < end && has_values) {
                const long long from = offset(at);
                key[i].read(keys + from);
                value[i].read(values + from);
            }
        }
    };
    load(begin + team);
    const Word mbarrier = smem_address(&arrived);
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            mbarrier_init(mbarrier, 1);
            fence_mbarrier_init();
            if (split == 0) mbarrier_arrive_expect_tx(mbarrier, CLUSTER * count * (DIM + 2) * static_cast<int>(sizeof(float)));
        }
        barrier_cluster_sync();  // all CTAs run, and rank 0's mbarrier is there
    }
    float query[GROUP][kVector];
    Softmax softmax[GROUP];
#pragma unroll
    for (int head = 0; head < GROUP; ++head) softmax[head].clear();
    // Attends to the token's own position; all lanes of a warp call it, once `query` is there.
    auto attend_to_new = [&](const float (&new_key)[kVector], const float (&new_value)[kVector]) {
#pragma unroll
        for (int head = 0; head < GROUP; ++head) {
            float score = 0;
#pragma unroll
            for (int j = 0; j < kVector; ++j) score += has_values ? query[head][j] * new_key[j] : 0;
            score = team_sum(score) * (scale * kLog2E);
            if (team == 0) softmax[head].raise(score), softmax[head].add(score, new_value);
        }
    };
#if ROPE
    {
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
            if (team == 0 && has_values && blockIdx.y % groups == 0) {
                const long long start = base + static_cast<long long>(position) * DIM;
#pragma unroll
                for (int i = 0; i < kVector; ++i) store(keys + start + i, new_key[i]), store(values + start + i, new_value[i]);
            }
            attend_to_new(new_key, new_value);
        }
    }
#else
#if PAGE
    const bool takes_new = length > 0 && split == splits - 1 && warp == 0;
    Loaded loaded_key, loaded_value;
    loaded_key.clear(), loaded_value.clear();
    if (takes_new && has_values) {  // loaded with the queries, not after them
        loaded_key.read(new_keys + static_cast<long long>(row) * key_stride + kv_head * DIM + part * kVector);
        loaded_value.read(new_values + static_cast<long long>(row) * value_stride + kv_head * DIM + part * kVector);
    }
#endif
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
        Loaded loaded;
        loaded.clear();
        if (has_values && head < count)
            loaded.read(q + static_cast<long long>(row) * (PAGE ? stride : heads * DIM) + (first_head + head) * DIM + part * kVector);
        loaded.widen(query[head]);
    }
#if PAGE
    if (takes_new) {
        const long long slot = slots[row];
        if (slot >= 0 && team == 0 && has_values && blockIdx.y % groups == 0) {
            const long long to = in_page(slot / PAGE, static_cast<int>(slot % PAGE));
            loaded_key.write(keys + to), loaded_value.write(values + to);
        }
        float new_key[kVector], new_value[kVector];
        loaded_key.widen(new_key), loaded_value.widen(new_value);
        attend_to_new(new_key, new_value);
    }
#endif
#endif
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
                scores[i] = team_sum(scores[i]) * (scale * kLog2E);
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
    // From here on a thread computes values of heads.
    auto finish = [&](int head, int column, const Merged& total) {
        const float result = PAGE && total.sum == 0 ? 0.0f : total.value / total.sum;
        store(out + (static_cast<long long>(row) * heads + first_head + head) * DIM + column, result);
    };
    auto from_shared = [](const float* from) { return *from; };
    Partial* of_token = partials + (static_cast<long long>(row) * heads + first_head) * splits;
    for (int i = threadIdx.x; i < count * DIM; i += kThreads) {
        const int head = i / DIM, column = i % DIM;
        const Merged total = merged(&warp_partials[0][head], GROUP, kWarps, column, from_shared);
        if (CLUSTER > 1) {
            const Word to = smem_address(&split_partials[split][head]);
            constexpr int kFloat = static_cast<int>(sizeof(float));
            st_async(to + column * kFloat, __float_as_uint(total.value), mbarrier, 0);
            if (column == 0) st_async(to + DIM * kFloat, __float_as_uint(total.maximum), mbarrier, 0);
            if (column == 1) st_async(to + (DIM + 1) * kFloat, __float_as_uint(total.sum), mbarrier, 0);
        } else if (splits == 1) {
            finish(head, column, total);
        } else {
            Partial& to = of_token[head * splits + split];
            to.values[column] = total.value;
            if (column == 0) to.maximum = total.maximum, to.sum = total.sum;
        }
    }
    if constexpr (CLUSTER > 1) {
        if (split) return;
        mbarrier_wait_parity(mbarrier, 0);
        for (int i = threadIdx.x; i < count * DIM; i += kThreads)
            finish(i / DIM, i % DIM, merged(&split_partials[0][i / DIM], GROUP, CLUSTER, i % DIM, from_shared));
        return;
    }
    if (splits == 1) return;
    __syncthreads();
    int* counter = counters + row * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) last = atom_acq_rel_gpu_increment(counter) == splits - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *counter = 0;
    auto from_global = [](const float* from) { return __ldcg(from); };
    for (int i = threadIdx.x; i < count * DIM; i += kThreads)
        finish(i / DIM, i % DIM, merged(of_token + i / DIM * splits, 1, splits, i % DIM, from_global));
}
