// y[m, n] = sum_k x[m, k] * w[n, k] on a CPU, straight from the bytes on disk (README.md, "Layout"), in float32.
//
// One thread computes a row tile (16 rows). It sums each group in a vector of 8 lanes (4 for groups of 4 columns), adds these
// vectors in the groups' stored order, and adds the lanes at the end: the number of threads changes no bit of y.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scalars.hpp"

namespace {

constexpr int kRows = 16, kChunkGroups = 4;

struct Weight {
    const uint64_t* masks;   // [row_tiles, column_tiles]
    const int32_t* starts;   // [chunks + 1]
    const uint8_t* codes;    // [kept, size * bits / 8]
    const void* scale;       // [kept], of `type`
    const uint8_t* zero;     // [kept]
    int64_t rows, row_tiles, column_tiles, size, bits;
    int64_t type;            // 0 float32, 1 float16, 2 bfloat16
};

struct Activations {
    const float* values;  // [tokens, columns], zeros from K on
    int64_t columns;      // K, padded to whole chunks
};

float scale_of(const Weight& weight, int64_t group) {
    return with_type(weight.type, [&](auto type) {
        return type.widen(static_cast<const typename decltype(type)::Stored*>(weight.scale)[group]);
    });
}

template <int kLanes>
struct Vector {
    typedef float Floats __attribute__((vector_size(4 * kLanes)));
    typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
    typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
    typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));
};

// Dequantises kLanes columns. Their codes are one little-endian number: first the even columns, then the odd ones.
template <int kBits, int kLanes>
inline typename Vector<kLanes>::Floats dequantise(const uint8_t* codes, float zero, float scale) {
    using V = Vector<kLanes>;
    uint64_t number = 0;
    std::memcpy(&number, codes, kLanes * kBits / 8);
    typename V::Words words, shifts;
    for (int i = 0; i < kLanes; ++i) shifts[i] = (i / 2 + i % 2 * (kLanes / 2)) * kBits % 32;
    if constexpr (kLanes * kBits > 32) {  // 64 bits: odd lanes get the upper word, which holds the odd columns
        words = reinterpret_cast<typename V::Words>(typename V::Longs{} + number);
    } else {
        words = typename V::Words{} + static_cast<uint32_t>(number);
    }
    words = words >> shifts & ((1u << kBits) - 1);
    const auto integers = reinterpret_cast<typename V::Integers>(words);
    return (__builtin_convertvector(integers, typename V::Floats) - zero) * scale;
}

template <int kBits, int kLanes, int kTokens>
void multiply_tile(const Weight& weight, int64_t tile, const Activations& x, float* y) {
    using Floats = typename Vector<kLanes>::Floats;
    Floats accumulators[kRows][kTokens] = {};
    const int64_t first_chunk = tile * weight.column_tiles;
    int64_t group = weight.starts[first_chunk];
    const uint8_t* codes = weight.codes + group * (weight.size * kBits / 8);
    for (int64_t chunk = 0; chunk < weight.column_tiles; ++chunk) {
        for (uint64_t mask = weight.masks[first_chunk + chunk]; mask; mask &= mask - 1, ++group) {
            const int bit = __builtin_ctzll(mask);
            const float scale = scale_of(weight, group);
            const float zero = static_cast<float>(weight.zero[group]) * from_bits((kBits + 119) << 23);  // 2^(bits - 8)
            const float* inputs = x.values + (chunk * kChunkGroups + bit % kChunkGroups) * weight.size;
            Floats group_sums[kTokens] = {};
            for (int64_t first = 0; first < weight.size; first += kLanes, codes += kLanes * kBits / 8) {
                const Floats values = dequantise<kBits, kLanes>(codes, zero, scale);
                for (int token = 0; token < kTokens; ++token) {
                    Floats input;
                    std::memcpy(&input, inputs + token * x.columns + first, sizeof input);
                    group_sums[token] += values * input;
                }
            }
            for (int token = 0; token < kTokens; ++token) accumulators[bit / kChunkGroups][token] += group_sums[token];
        }
    }
    const int64_t row = tile * kRows;
    for (int64_t r = 0; r < std::min<int64_t>(kRows, weight.rows - row); ++r) {
        for (int token = 0; token < kTokens; ++token) {
            float sum = 0;
            for (int i = 0; i < kLanes; ++i) sum += accumulators[r][token][i];
            y[token * weight.rows + row + r] = sum;
        }
    }
}

// Eight tokens at a time share the dequantisation; the remaining ones go 4, 2 and 1 at a time.
template <int kBits, int kLanes, int kTokens = 8>
void multiply_tokens(const Weight& weight, int64_t tile, Activations x, float* y, int64_t tokens) {
    for (; tokens >= kTokens; tokens -= kTokens, x.values += kTokens * x.columns, y += kTokens * weight.rows)
        multiply_tile<kBits, kLanes, kTokens>(weight, tile, x, y);
    if constexpr (kTokens > 1) multiply_tokens<kBits, kLanes, kTokens / 2>(weight, tile, x, y, tokens);
}

using Multiply = void (*)(const Weight&, int64_t, Activations, float*, int64_t);

template <int kLanes>
Multiply multiply_of(int64_t bits) {
    if (bits == 8) return multiply_tokens<8, kLanes>;
    if (bits == 4) return multiply_tokens<4, kLanes>;
    if (bits == 3) return multiply_tokens<3, kLanes>;
    return multiply_tokens<2, kLanes>;
}

}  // namespace

// x is [tokens, columns], zeros from K on; y is [tokens, rows].
extern "C" void gqs_matmul(const Weight* weight, const float* x, int64_t columns, float* y, int64_t tokens, int threads) {
    const Multiply multiply = weight->size == 4 ? multiply_of<4>(weight->bits) : multiply_of<8>(weight->bits);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < weight->row_tiles; ++tile) multiply(*weight, tile, {x, columns}, y, tokens);
}
