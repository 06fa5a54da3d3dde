// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight on a CPU, straight from its bytes: README.md tells them.
//
// Everything is in float32. A row is summed by one thread, each lane of a unit (eight columns, or four) in the order of the
// row's groups and the lanes at the end, so the number of threads changes no bit.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scalars.hpp"

namespace {

constexpr int kTileRows = 16, kTileGroups = 4;

struct Weight {
    const uint64_t* masks;   // [row_tiles, column_tiles]
    const int32_t* starts;   // [chunks + 1]
    const uint8_t* codes;    // [kept, size * bits / 8]
    const void* scale;       // [kept], of `type`
    const uint8_t* zero;     // [kept]
    int64_t rows, row_tiles, column_tiles, size, bits;
    int64_t type;            // 0 float32, 1 float16, 2 bfloat16
};

struct Inputs {
    const float* values;  // [tokens, columns], columns those of the groups, zeros past K
    int64_t columns;
};

float scale_of(const Weight& weight, int64_t place) {
    return with_type(weight.type, [&](auto type) {
        return type.widen(static_cast<const typename decltype(type)::Stored*>(weight.scale)[place]);
    });
}

template <int kUnit>
struct Unit {
    typedef float Floats __attribute__((vector_size(4 * kUnit)));
    typedef int32_t Integers __attribute__((vector_size(4 * kUnit)));
    typedef uint32_t Words __attribute__((vector_size(4 * kUnit)));
    typedef uint64_t Numbers __attribute__((vector_size(4 * kUnit)));
};

// Gives the weights of a unit. The even columns are the first half of its codes.
template <int kBits, int kUnit>
inline typename Unit<kUnit>::Floats dequantise(const uint8_t* codes, float zero, float scale) {
    using Of = Unit<kUnit>;
    uint64_t number = 0;
    std::memcpy(&number, codes, kUnit * kBits / 8);
    typename Of::Words found, shifts;
    for (int i = 0; i < kUnit; ++i) shifts[i] = (i / 2 + i % 2 * (kUnit / 2)) * kBits % 32;
    if constexpr (kUnit * kBits > 32) {  // the second half in every second word
        found = reinterpret_cast<typename Of::Words>(typename Of::Numbers{} + number);
    } else {
        found = typename Of::Words{} + static_cast<uint32_t>(number);
    }
    found = found >> shifts & ((1u << kBits) - 1);
    const auto integers = reinterpret_cast<typename Of::Integers>(found);
    return (__builtin_convertvector(integers, typename Of::Floats) - zero) * scale;
}

template <int kBits, int kUnit, int kTokens>
void multiply_tile(const Weight& weight, int64_t tile, const Inputs& x, float* y) {
    using Floats = typename Unit<kUnit>::Floats;
    Floats sums[kTileRows][kTokens] = {};
    const int64_t first_chunk = tile * weight.column_tiles;
    int64_t place = weight.starts[first_chunk];
    const uint8_t* codes = weight.codes + place * (weight.size * kBits / 8);
    for (int64_t chunk = 0; chunk < weight.column_tiles; ++chunk) {
        for (uint64_t mask = weight.masks[first_chunk + chunk]; mask; mask &= mask - 1, ++place) {
            const int bit = __builtin_ctzll(mask);
            const float scale = scale_of(weight, place);
            const float zero = static_cast<float>(weight.zero[place]) * from_bits((kBits + 119) << 23);  // 2^(bits - 8)
            const float* inputs = x.values + (chunk * kTileGroups + bit % kTileGroups) * weight.size;
            Floats of_group[kTokens] = {};
            for (int64_t first = 0; first < weight.size; first += kUnit, codes += kUnit * kBits / 8) {
                const Floats values = dequantise<kBits, kUnit>(codes, zero, scale);
                for (int token = 0; token < kTokens; ++token) {
                    Floats input;
                    std::memcpy(&input, inputs + token * x.columns + first, sizeof input);
                    of_group[token] += values * input;
                }
            }
            for (int token = 0; token < kTokens; ++token) sums[bit / kTileGroups][token] += of_group[token];
        }
    }
    const int64_t row = tile * kTileRows;
    for (int64_t r = 0; r < std::min<int64_t>(kTileRows, weight.rows - row); ++r) {
        for (int token = 0; token < kTokens; ++token) {
            float sum = 0;
            for (int i = 0; i < kUnit; ++i) sum += sums[r][token][i];
            y[token * weight.rows + row + r] = sum;
        }
    }
}

// Tokens that share the work of making weights of codes: eight at a time, then the rest.
template <int kBits, int kUnit, int kTokens = 8>
void multiply_tokens(const Weight& weight, int64_t tile, Inputs x, float* y, int64_t tokens) {
    for (; tokens >= kTokens; tokens -= kTokens, x.values += kTokens * x.columns, y += kTokens * weight.rows)
        multiply_tile<kBits, kUnit, kTokens>(weight, tile, x, y);
    if constexpr (kTokens > 1) multiply_tokens<kBits, kUnit, kTokens / 2>(weight, tile, x, y, tokens);
}

using Multiply = void (*)(const Weight&, int64_t, Inputs, float*, int64_t);

template <int kUnit>
Multiply multiply_of(int64_t bits) {
    if (bits == 8) return multiply_tokens<8, kUnit>;
    if (bits == 4) return multiply_tokens<4, kUnit>;
    if (bits == 3) return multiply_tokens<3, kUnit>;
    return multiply_tokens<2, kUnit>;
}

}  // namespace

// x is [tokens, columns], columns those of the groups, zeros past K; y is [tokens, rows].
extern "C" void gqs_product(
    const Weight* weight, const float* x, int64_t columns, float* y, int64_t tokens, int threads
) {
    const Multiply multiply = weight->size == 4 ? multiply_of<4>(weight->bits) : multiply_of<8>(weight->bits);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < weight->row_tiles; ++tile) multiply(*weight, tile, {x, columns}, y, tokens);
}
