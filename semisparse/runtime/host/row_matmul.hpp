// y[M, N] = x[M, K] @ w[N, K].T on a CPU, where a format unpacks a band of rows of w at a time into a buffer of a cache's size.
//
// Each band is multiplied with all tokens while it is in a cache: tiles of 4 rows by up to 6 tokens, or 8 rows by
// up to 2, have their accumulators in registers. Both operands are contiguous along K, so nothing is transposed or copied.
// Operands are float32, or bfloat16 where the CPU multiplies it (AVX512-BF16); sums are float32. Every output is accumulated
// over K in the same order, whatever the number of threads, and whatever other tokens there are.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float Floats16 __attribute__((vector_size(64)));

struct Float32Product {
    using Operand = float;
    using Register = Floats16;
    static constexpr int kLanes = 16;
    static void accumulate(Floats16& sum, Register weight, Register x) { sum += weight * x; }
};

#if defined(__AVX512BF16__)
#define HAS_BFLOAT16_PRODUCT
struct BFloat16Product {
    using Operand = uint16_t;
    using Register = __m512bh;
    static constexpr int kLanes = 32;
    static void accumulate(Floats16& sum, Register weight, Register x) { sum = (Floats16)_mm512_dpbf16_ps((__m512)sum, weight, x); }
};
#endif

// Sums the lanes of 16 vectors: lane 4 t + r of the result is the sum of vectors[t][r].
inline Floats16 lane_sums(const Floats16* const (&vectors)[4]) {
#if defined(__AVX512F__)
    __m512 tokens[4];  // [r] of 4 lanes each
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
        const __m512 a = (__m512)vectors[t][0], b = (__m512)vectors[t][1], c = (__m512)vectors[t][2], d = (__m512)vectors[t][3];
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        tokens[t] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(tokens[0], tokens[1]), _mm512_unpackhi_ps(tokens[0], tokens[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(tokens[2], tokens[3]), _mm512_unpackhi_ps(tokens[2], tokens[3]));
    const __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
    const __m512 by_row = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)));
    const __m512i transposed = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return (Floats16)_mm512_permutexvar_ps(transposed, by_row);
#else
    Floats16 sums;
    for (int i = 0; i < 16; ++i) {
        Floats16 vector = vectors[i / 4][i % 4];
        for (int width = 8; width > 0; width /= 2)
            for (int lane = 0; lane < width; ++lane) vector[lane] += vector[lane + width];
        sums[i] = vector[0];
    }
    return sums;
#endif
}

template <typename Operand>
struct Matrices {
    const Operand* x;   // [tokens, stride]
    const float* bias;  // [rows] or null
    Operand* y;         // [tokens, rows]
    Operand* bands;     // [threads, rows of a band, stride], finite
    int64_t tokens, rows, threads, band_rows;
    int64_t columns;  // K, padded with zeros to a multiple of 64
    int64_t stride;   // an odd number of cache lines: rows of 4 KB would all compete for the same few lines of the L1 cache
};

// The same as MatmulCall in runtime/row_matmul.py.
struct MatmulCall {
    const void* x;
    const float* bias;
    void *y, *bands;
    int64_t tokens, rows, threads, band_rows, columns, stride, bfloat16;

    template <typename Operand>
    Matrices<Operand> matrices() const {
        return {static_cast<const Operand*>(x), bias,      static_cast<Operand*>(y), static_cast<Operand*>(bands), tokens, rows,
                threads,                        band_rows, columns,                  stride};
    }
};

// Whether x and the bands may be bfloat16.
extern "C" int multiplies_bfloat16() {
#ifdef HAS_BFLOAT16_PRODUCT
    return 1;
#else
    return 0;
#endif
}

// Stores the outputs of `kTokens` tokens, up to 4, in four rows, or in as many as exist. `sums` are their accumulators.
template <int kTokens, typename Operand>
inline void store_outputs(const Matrices<Operand>& matrices, const Floats16* sums, int64_t sums_per_token, int64_t token, int64_t row) {
    const Floats16* const vectors[4] = {sums, sums + std::min(1, kTokens - 1) * sums_per_token,
                                        sums + std::min(2, kTokens - 1) * sums_per_token,
                                        sums + std::min(3, kTokens - 1) * sums_per_token};
    const int64_t count = std::min<int64_t>(4, matrices.rows - row);
    Floats16 outputs = lane_sums(vectors);
    if (matrices.bias)
        for (int i = 0; i < 16; ++i) outputs[i] += i % 4 < count ? matrices.bias[row + i % 4] : 0;
    Operand rounded[16];
    if constexpr (sizeof(Operand) == sizeof(float)) {
        std::memcpy(rounded, &outputs, sizeof outputs);
    } else {
#ifdef HAS_BFLOAT16_PRODUCT
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)outputs);
        std::memcpy(rounded, &narrow, sizeof narrow);
#endif
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
        Operand* y = matrices.y + (token + t) * matrices.rows + row;
        if (count == 4)
            std::memcpy(y, rounded + 4 * t, 4 * sizeof(Operand));
        else
            std::memcpy(y, rounded + 4 * t, count * sizeof(Operand));
    }
}

// A band of rows that is being multiplied.
template <typename Operand>
struct Band {
    const Operand* weights;  // [rows of a band, stride]
    int64_t row, valid;      // its first row in w, and how many of its rows exist
};

// The micro-kernel: rows `first` to `first + kRows` of a band by `kTokens` tokens.
template <typename Product, int kRows, int kTokens>
void multiply_tile(const Matrices<typename Product::Operand>& matrices, const Band<typename Product::Operand>& band, int64_t first,
                   int64_t token) {
    using Register = typename Product::Register;
    const auto* weights = band.weights + first * matrices.stride;
    const auto* x = matrices.x + token * matrices.stride;
    Floats16 sums[kTokens][kRows] = {};
    for (int64_t column = 0; column < matrices.columns; column += Product::kLanes) {
        Register factors[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) std::memcpy(&factors[r], weights + r * matrices.stride + column, sizeof(Register));
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            Register inputs;
            std::memcpy(&inputs, x + t * matrices.stride + column, sizeof(Register));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) Product::accumulate(sums[t][r], factors[r], inputs);
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r += 4) {
        if (first + r >= band.valid) break;
        store_outputs<std::min(kTokens, 4)>(matrices, &sums[0][r], kRows, token, band.row + first + r);
        if constexpr (kTokens > 4) store_outputs<kTokens - 4>(matrices, &sums[4][r], kRows, token + 4, band.row + first + r);
    }
}

// Multiplies all rows of a band with `kTokens` tokens.
template <typename Product, int kTokens>
void multiply_tokens(const Matrices<typename Product::Operand>& matrices, const Band<typename Product::Operand>& band,
                     int64_t token) {
    constexpr int kRows = kTokens <= 2 ? 8 : 4;
    for (int64_t first = 0; first < band.valid; first += kRows)
        multiply_tile<Product, kRows, kTokens>(matrices, band, first, token);
}

template <typename Product>
void multiply_band(const Matrices<typename Product::Operand>& matrices, const Band<typename Product::Operand>& band) {
    constexpr int64_t kMost = 6;
    const int64_t tiles = (matrices.tokens + kMost - 1) / kMost;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t token = tile * matrices.tokens / tiles, count = (tile + 1) * matrices.tokens / tiles - token;
        if (count == 6) multiply_tokens<Product, 6>(matrices, band, token);
        if (count == 5) multiply_tokens<Product, 5>(matrices, band, token);
        if (count == 4) multiply_tokens<Product, 4>(matrices, band, token);
        if (count == 3) multiply_tokens<Product, 3>(matrices, band, token);
        if (count == 2) multiply_tokens<Product, 2>(matrices, band, token);
        if (count == 1) multiply_tokens<Product, 1>(matrices, band, token);
    }
}

// Computes y. `unpack(row, count, band)` writes the rows `row` to `row + count` of w to `band`, [band_rows, stride].
template <typename Product, typename Unpack>
void multiply_unpacked(const Matrices<typename Product::Operand>& matrices, Unpack unpack) {
    const int64_t band_rows = matrices.band_rows, threads = matrices.threads;
    const int64_t bands = (matrices.rows + band_rows - 1) / band_rows;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; ++thread) {
        auto* weights = matrices.bands + thread * band_rows * matrices.stride;
        for (int64_t index = thread * bands / threads; index < (thread + 1) * bands / threads; ++index) {
            const int64_t row = index * band_rows, valid = std::min(band_rows, matrices.rows - row);
            unpack(row, valid, weights);
            multiply_band<Product>(matrices, {weights, row, valid});
        }
    }
}

// Writes `count` rows of w from `first` on to `rows`, [count, stride], `grain` of them at a time; `unpack` as above.
template <typename Operand, typename Unpack>
void unpack_rows(int64_t first, int64_t count, int64_t grain, int64_t stride, Operand* rows, int threads, Unpack unpack) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < count; row += grain)
        unpack(first + row, std::min(grain, count - row), rows + row * stride);
}
