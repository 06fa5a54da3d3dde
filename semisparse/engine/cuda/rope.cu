// Rotary position embedding of queries and keys, and writing keys and values to the cache.
//
// A row of qkv holds a token's query, key and value heads, DIM elements each, from the columns q_start, k_start and v_start on. Row r
// is a token of sequence r / tokens, where `tokens` is the number of rows per sequence; its position is positions[r]. Keys and values
// are written at that position of the KV cache [sequences, kv_heads, length, DIM], rotated queries to q_out [m, heads, DIM]. If q_norm
// (k_norm) is not null, RMSNorm with that weight is applied to each query (key) head before the rotation (Qwen3). Intermediate results
// are rounded to SCALAR wherever Hugging Face Transformers rounds them.
//
// Grid: (ceil((heads + 2 kv_heads) / 4), m). CTA: 128 threads, a warp per head. No shared memory.
//
// Macros: SCALAR (element type), DIM (elements per head, even).

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

constexpr int kHalf = DIM / 2;
constexpr int kPairs = (kHalf + 31) / 32;  // pairs (i, i + DIM / 2) per lane

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
    const int head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
    if (head >= heads + 2 * kv_heads) return;
    const int position = positions[row];
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const int own = is_query ? head : is_value ? head - heads - kv_heads : head - heads;
    const int start = (is_query ? q_start : is_value ? v_start : k_start) + own * DIM;
    const SCALAR* from = qkv + static_cast<long long>(row) * stride + start;
    const long long cache_offset = ((static_cast<long long>(row / tokens) * kv_heads + own) * length + position) * DIM;
    SCALAR* to = is_query ? q_out + (static_cast<long long>(row) * heads + own) * DIM : (is_value ? values : keys) + cache_offset;
    float first[kPairs] = {}, second[kPairs] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int column = lane + 32 * i;
        if (column < kHalf) first[i] = to_float(from[column]), second[i] = to_float(from[column + kHalf]);
    }
    const SCALAR* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
    if (norm) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) squares += first[i] * first[i] + second[i] * second[i];
#pragma unroll
        for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        const float scale = rsqrtf(squares / DIM + epsilon);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int column = lane + 32 * i;
            if (column >= kHalf) continue;
            first[i] = rounded(to_float(norm[column]) * rounded(first[i] * scale));
            second[i] = rounded(to_float(norm[column + kHalf]) * rounded(second[i] * scale));
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int column = lane + 32 * i;
        if (column >= kHalf) continue;
        float low = first[i], high = second[i];
        if (!is_value) {
            const float cosine = to_float(cosines[static_cast<long long>(position) * kHalf + column]);
            const float sine = to_float(sines[static_cast<long long>(position) * kHalf + column]);
            low = rounded(first[i] * cosine) - rounded(second[i] * sine);
            high = rounded(second[i] * cosine) + rounded(first[i] * sine);
        }
        store(to + column, low);
        store(to + column + kHalf, high);
    }
}
