// y[m, n] = sum_k x[m, k] * w[n, k] for 1 to 16 tokens, straight from a gqs weight with groups of 16 in 4 or 8 bits.
//
// Grid: one CTA per row tile (16 rows of w), or CTAS_PER_SM CTAs per SM, with several row tiles each (schedule.cuh).
//
// CTA: WARPS warps, all alike. A warp has a contiguous range of chunks (16 rows by 4 groups; chunk.cuh). It streams their kept
// groups through its own ring in shared memory by cp.async (stream.cuh), and multiplies k-tiles of CHUNKS_PER_K_TILE chunks by
// mma.sync:
//   mma_codes.cuh         1 or 2 tokens, 4-bit codes: x in 16 bits times the codes; scales are applied to accumulators
//   mma_int8.cuh          the same for W4A8: x is quantised to int8 here
//   mma_dequantised.cuh   3 to 16 tokens, or 8-bit codes: codes are dequantised first
// The CTA synchronises when x is in shared memory (1 or 2 tokens; once more with INT8_X or RMS_NORM), and before partial
// accumulators are added (schedule.cuh).
//
// Shared memory: a stream per warp (6,656 bytes in 4 bits, 10,752 in 8; figure in stream.cuh), then x for 1 or 2 tokens
// (figure in block_diagonal.cuh); static: `partials`. With 8 warps, one token and K = 4096: 62,976 + 512 bytes.
//
// Programmatic dependent launch: before griddepcontrol.wait a warp only prefetches to L2, which is harmless even if the
// preceding kernel still writes the weight. Memory is idle while that kernel's last CTAs finish: this saves 0.2 to 0.5 us on
// small weights.
//
// Bound by instruction issue and the ALU pipe: 87 instructions per chunk (fp16, one token), whatever the chunk keeps. On an
// H200 one token of W4S50 takes 5.5 us at 4096 x 4096 and 36.9 us at 28672 x 8192, 4.0 and 1.9 times the time that its bytes
// take (results/h200/gqs-decode.csv; instruction counts and profiles in docs/kernels/gqs.md).
//
// With EXPERTS (rows.cuh) the weight is a stack of experts. blockIdx.y is the expert or, if TOKENS is 1, the pair of a token
// and an expert; blockIdx.x is as above, over the expert's row tiles. CTAs of an expert that no token chose end at once. If an
// expert has more than TOKENS pairs, its CTAs multiply them TOKENS at a time.
//
// A fused kernel (fusion.cuh) fills its streams before griddepcontrol.wait, and loads x after it.
//
// Macros: SCALAR (__half or __nv_bfloat16), BITS (4 or 8), TOKENS (maximum m: 1, 2, 8 or 16), INT8_X (quantises x), WARPS,
// CTAS_PER_SM (for registers), CHUNKS_PER_K_TILE, STAGE_GROUPS and STAGES (stream.cuh), ALIGNED_K (K is a multiple of 256 and
// x aligned to 16 bytes), STREAM_K (a CTA has several row tiles), EXPERTS, and those of fusion.cuh. cuda/schedule.py chooses them.

#include "mma_codes.cuh"
#include "mma_dequantised.cuh"
#include "mma_int8.cuh"
#include "ptx/griddepcontrol.cuh"
#include "rows.cuh"
#include "schedule.cuh"

template <bool condition, typename Then, typename Else> struct Select { using Type = Then; };
template <typename Then, typename Else> struct Select<false, Then, Else> { using Type = Else; };

using Mma = Select<(TOKENS > 2), MmaDequantised, Select<INT8_X, MmaInt8, MmaCodes>::Type>::Type;
using Schedule = Select<STREAM_K, StreamK<Mma>, TilePerCta<Mma>>::Type;

#if EXPERTS
extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_gqs_experts(
    const Element* x,         // [pairs / pairs_per_x, k]
    const uint2* masks,       // [experts * chunks]
    const Word* starts,       // [experts * chunks + 1]
    const char* codes,        // [kept, kGroupBytes]
    const char* scale,        // [kept], an Element each
    const char* zero,         // [kept]
    const Element* bias,      // [experts * n] or null
    Element* y,               // [pairs, n], or [pairs, n / 2] with SILU_MUL
    const long long* chosen,  // [pairs], the expert of each pair
    int pairs, int pairs_per_x, int experts,
    int n, int k,
    int chunks_per_tile, int chunks, int kept,  // chunks per row tile and per expert; kept groups of the stack
    int tiles_per_cta, int ctas_with_extra,     // of an expert, as in semisparse_gqs_decode
    int whole_at                                // as in semisparse_gqs_decode
) {
    extern __shared__ uint4 shared[];
    __shared__ Schedule::Partials partials;
    __shared__ int x_rows[TOKENS], y_rows[TOKENS];
    const Weight weight = {masks, starts, codes, scale, zero, experts * chunks, kept};
    const Word smem = smem_address(shared), own_smem = keep_in_register(smem + warp_id() * kStreamBytes);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Pairs<TOKENS> step{chosen, pairs, pairs_per_x, experts};
    const int expert = step.expert();
    float* whole = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + whole_at);
    Schedule schedule(chunks_per_tile, tiles_per_cta, ctas_with_extra, chunks, whole);
    schedule.first_chunk += expert * chunks;
    schedule.end_chunk += expert * chunks;
    for (int begin = 0;; begin += TOKENS) {
        const int found = step.find(begin, x_rows, y_rows);
        if (found <= 0) return;
        const Rows rows{x_rows, y_rows};
        const int m = min(found, TOKENS);
        Mma::Activations activations(x, rows, m, k, nullptr);
        activations.load_first(0.0f);
        WeightStream stream(weight, own_smem, schedule.first_chunk, schedule.end_chunk);
        Mma mma(activations, smem + WARPS * kStreamBytes);
        schedule.run(stream, mma, {bias ? bias + expert * n : nullptr, nullptr, y, rows, m, n, mma}, partials);
        if (TOKENS == 1 || found <= TOKENS) return;
        cp_async_wait_group<0>();
        __syncthreads();
    }
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_gqs_decode(
    // Not __restrict__: loads that the compiler takes for constants could move before griddepcontrol.wait.
    const Element* x,         // [m, k]
    const uint2* masks,       // [chunks]
    const Word* starts,       // [chunks + 1]
    const char* codes,        // [kept, kGroupBytes]
    const char* scale,        // [kept], an Element each
    const char* zero,         // [kept]
    const Element* bias,         // [n] or null
    const Element* norm_weight,  // [k], aligned to 16 bytes, with RMS_NORM
    const Element* residual,     // [m, n] with ADD_RESIDUAL
    Element* y,                  // [m, n], or [m, n / 2] with SILU_MUL
    int m, int n, int k,
    int chunks_per_tile, int chunks, int kept,  // chunks per row tile; chunks and kept groups of the weight
    int tiles_per_cta, int ctas_with_extra,     // row tiles per CTA; the first `ctas_with_extra` CTAs have one more
    int prefetch_groups,                        // groups that each warp prefetches to L2
    int whole_at,                               // offset of StreamK::whole in dynamic shared memory, in bytes
    float epsilon                               // of RMS_NORM
) {
    extern __shared__ uint4 shared[];  // a stream per warp, then x (Mma), then StreamK::whole
    __shared__ Schedule::Partials partials;
    const Weight weight = {masks, starts, codes, scale, zero, chunks, kept};
    float* whole = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + whole_at);
    const Schedule schedule(chunks_per_tile, tiles_per_cta, ctas_with_extra, chunks, whole);
    const int warp = warp_id();
    const Word smem = smem_address(shared), own_smem = keep_in_register(smem + warp * kStreamBytes);
    if constexpr (kFused) {
        griddepcontrol_launch_dependents();
        WeightStream stream(weight, own_smem, schedule.first_chunk, schedule.end_chunk);
        Mma::Activations activations(x, {}, m, k, norm_weight);
        griddepcontrol_wait();
        activations.load_first(epsilon);
        Mma mma(activations, smem + WARPS * kStreamBytes);
        schedule.run(stream, mma, {bias, residual, y, {}, m, n, mma}, partials);
    } else {
        weight.prefetch(schedule.first_chunk, schedule.end_chunk, prefetch_groups);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        Mma::Activations activations(x, {}, m, k, norm_weight);
        activations.load_first(epsilon);
        WeightStream stream(weight, own_smem, schedule.first_chunk, schedule.end_chunk);
        Mma mma(activations, smem + WARPS * kStreamBytes);
        schedule.run(stream, mma, {bias, residual, y, {}, m, n, mma}, partials);
    }
}
#endif
