// Rotary position embedding of queries and keys, and writing keys and values to the cache.
//
// A row of qkv holds a token's query, key and value heads, DIM elements each, from the columns q_start, k_start and v_start on. Row r
// is a token of sequence r / tokens, where `tokens` is the number of rows per sequence; its position is positions[r]. Keys and values
// are written at that position of the KV cache [sequences, kv_heads, length, DIM], rotated queries to q_out [m, heads, DIM]. If q_norm
// (k_norm) is not null, RMSNorm with that weight is applied to each query (key) head before the rotation (Qwen3). Intermediate results
// are rounded to SCALAR wherever Hugging Face Transformers rounds them.
//
// Grid: m * ceil((heads + 2 kv_heads) / (128 / LANES)) along x (a grid ends at 65,535 along y, and prompts are longer), all CTAs of a
// row after those of the row before. CTA: 128 threads. LANES of them rotate a head: each loads VECTOR values of its first half and the
// same columns of its second half at a time. No shared memory. Bound: memory for many rows.
//
// Macros: SCALAR (element type), DIM (elements per head, even), VECTOR (values per load: DIM / 2, stride and starts are multiples of it,
// and all arrays are aligned to it), LANES (a power of two up to 32).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"
#include "vector.cuh"

constexpr int kHalf = DIM / 2;
constexpr int kHeads = 128 / LANES;  // per CTA
constexpr int kUnits = (kHalf / VECTOR + LANES - 1) / LANES;  // pairs of units (i, i + kHalf / VECTOR) per lane
static_assert(kHalf % VECTOR == 0 && 32 % LANES == 0);

__device__ __forceinline__ float rounded(float value) {
    SCALAR result;
    store(&result, value);
    return to_float(result);
}

extern "C" __global__ void __launch_bounds__(128) semisparse_engine_rope(
    const SCALAR* qkv,       // [m, stride]
    const SCALAR* q_norm,    // [DIM] or null
    const SCALAR* k_norm,    // [DIM] or null
    const SCALAR* cosines,   // [length, DIM / 2]
    const SCALAR* sines,     // [length, DIM / 2]
    const int* positions,    // [m]
    SCALAR* q_out,           // [m, heads, DIM]
    SCALAR* keys,            // [sequences, kv_heads, length, DIM]
    SCALAR* values,          // [sequences, kv_heads, length, DIM]
    int heads, int kv_heads, int tokens, int length, int stride, int q_start, int k_start, int v_start, float epsilon
) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int row_ctas = (heads + 2 * kv_heads + kHeads - 1) / kHeads, row = blockIdx.x / row_ctas;
    const int head = blockIdx.x % row_ctas * kHeads + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const bool exists = head < heads + 2 * kv_heads;  // all lanes take part in shuffles
    const int position = positions[row];
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const int own = !exists ? 0 : is_query ? head : is_value ? head - heads - kv_heads : head - heads;
    const int start = (is_query ? q_start : is_value ? v_start : k_start) + own * DIM;
    const SCALAR* from = qkv + static_cast<long long>(row) * stride + start;
    const long long cache_offset = ((static_cast<long long>(row / tokens) * kv_heads + own) * length + position) * DIM;
    SCALAR* to = is_query ? q_out + (static_cast<long long>(row) * heads + own) * DIM : (is_value ? values : keys) + cache_offset;
    const long long angles = static_cast<long long>(position) * kHalf;
    Unit first[kUnits], second[kUnits], cosine[kUnits], sine[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const int unit = lane + LANES * i;
        first[i] = second[i] = cosine[i] = sine[i] = {};
        if (unit * VECTOR >= kHalf) continue;
        first[i] = load_unit(from, unit), second[i] = load_unit(from + kHalf, unit);
        if (!is_value) cosine[i] = load_unit(cosines + angles, unit), sine[i] = load_unit(sines + angles, unit);
    }
    const SCALAR* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
    if (q_norm || k_norm) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) squares += first[i].at(j) * first[i].at(j) + second[i].at(j) * second[i].at(j);
        }
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        const float scale = rsqrtf(squares / DIM + epsilon);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = lane + LANES * i;
            if (!norm || unit * VECTOR >= kHalf) continue;
            const Unit low = load_unit(norm, unit), high = load_unit(norm + kHalf, unit);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                first[i].set(j, low.at(j) * rounded(first[i].at(j) * scale));
                second[i].set(j, high.at(j) * rounded(second[i].at(j) * scale));
            }
        }
    }
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const int unit = lane + LANES * i;
        if (unit * VECTOR >= kHalf) continue;
        Unit low = first[i], high = second[i];
        if (!is_value) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const float x = first[i].at(j), y = second[i].at(j), c = cosine[i].at(j), s = sine[i].at(j);
                low.set(j, rounded(x * c) - rounded(y * s));
                high.set(j, rounded(y * c) + rounded(x * s));
            }
        }
        store_unit(to, unit, low);
        store_unit(to + kHalf, unit, high);
    }
}
