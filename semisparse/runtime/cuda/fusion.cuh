// Prologue and epilogue of a decode kernel: what a decoder layer computes just before and just after a matmul of few tokens.
//
//   RMS_NORM      x is normalised: x[m, :] / sqrt(mean(x[m, :]^2) + epsilon) * norm_weight
//   ADD_RESIDUAL  y = residual + x w^T
//   SILU_MUL      y[:, i] = silu(gate) * up, columns i and n / 2 + i of x w^T
//
// Each result is rounded to SCALAR where transformers rounds it. In a fused kernel the weight, the bias and norm_weight are
// constant: no kernel on the stream writes them, so they are read before griddepcontrol.wait, while the preceding kernel runs.
//
// Compiled with SCALAR, RMS_NORM, ADD_RESIDUAL and SILU_MUL (0 or 1).

#pragma once

#include "ptx/shared.cuh"
#include "types.cuh"
#include "warp_sum.cuh"

constexpr bool kFused = RMS_NORM || ADD_RESIDUAL || SILU_MUL;

__device__ __forceinline__ float rounded(float value) {
    SCALAR result;
    store(&result, value);
    return to_float(result);
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
    gate = rounded(gate);
    return rounded(gate / (1.0f + expf(-gate))) * rounded(up);
}

// The value in half `i` of a word.
__device__ __forceinline__ float value_of(Word word, int i) { return to_float(reinterpret_cast<const SCALAR*>(&word)[i]); }

// The sum of a word's two squared values.
__device__ __forceinline__ float squares_of(Word word) {
    return value_of(word, 0) * value_of(word, 0) + value_of(word, 1) * value_of(word, 1);
}

// A word of x times `scale`, rounded, times a word of the norm's weight. SCALAR has 16 bits where this is used.
template <typename Scalar = SCALAR>
__device__ __forceinline__ Word normalised(Word x, Word norm_weight, float scale) {
    return pack2(value_of(norm_weight, 0) * rounded(value_of(x, 0) * scale),
                 value_of(norm_weight, 1) * rounded(value_of(x, 1) * scale), static_cast<const Scalar*>(nullptr));
}
