// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight on a CPU, straight from its bytes: README.md tells them.
//
// A group's weights are rounded to the weight's dtype, as `unpack` does, and multiplied in float32. Rows are summed by one
// thread each, in the order of their groups, so the number of threads changes no bit.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scalars.hpp"

namespace {

constexpr int kTileRows = 16, kTileGroups = 4, kLargest = 128;

struct Weight {
    const uint64_t* masks;   // [row_tiles, column_tiles]
    const int32_t* starts;   // [chunks + 1]
    const uint8_t* codes;    // [kept, size * bits / 8]
    const void* scale;       // [kept], of `type`
    const uint8_t* zero;     // [kept]
    int64_t rows, row_tiles, column_tiles, size, bits;
    int64_t type;            // 0 float32, 1 float16, 2 bfloat16
};

uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Adding and taking away a number whose last place is that of the result rounds to nearest, half to even.
float round_to_half(float value) {
    const float magnitude = std::max(from_bits(to_bits(value) & 0x7f800000u), 0x1p-14f);
    const float anchor = magnitude * 0x1.8p13f;
    return (value + anchor) - anchor;
}

float round_to_bfloat16(float value) {
    const uint32_t bits = to_bits(value);
    return from_bits((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

float scale_of(const Weight& weight, int64_t place) {
    return with_type(weight.type, [&](auto type) {
        return type.widen(static_cast<const typename decltype(type)::Stored*>(weight.scale)[place]);
    });
}

void dequantise(const Weight& weight, int64_t place, float* values) {
    const int64_t unit = std::min<int64_t>(8, weight.size), bytes = unit * weight.bits / 8;
    const float scale = scale_of(weight, place);
    const float zero = static_cast<float>(weight.zero[place]) * from_bits((weight.bits + 119) << 23);  // 2^(bits - 8)
    const uint8_t* codes = weight.codes + place * (weight.size * weight.bits / 8);
    for (int64_t first = 0; first < weight.size; first += unit, codes += bytes) {
        uint64_t word = 0;
        std::memcpy(&word, codes, bytes);
        for (int64_t i = 0; i < unit; ++i) {
            const int64_t column = first + (i < unit / 2 ? 2 * i : 2 * i - unit + 1);
            values[column] = static_cast<float>(word >> weight.bits * i & ((1u << weight.bits) - 1));
        }
    }
    for (int64_t i = 0; i < weight.size; ++i) values[i] = (values[i] - zero) * scale;
    if (weight.type == 1) {
        for (int64_t i = 0; i < weight.size; ++i) values[i] = round_to_half(values[i]);
    } else if (weight.type == 2) {
        for (int64_t i = 0; i < weight.size; ++i) values[i] = round_to_bfloat16(values[i]);
    }
}

void multiply_tile(const Weight& weight, int64_t tile, const float* x, int64_t columns, float* y, int64_t tokens) {
    float values[kLargest];
    for (int64_t column_tile = 0; column_tile < weight.column_tiles; ++column_tile) {
        const int64_t chunk = tile * weight.column_tiles + column_tile;
        int64_t place = weight.starts[chunk];
        for (uint64_t mask = weight.masks[chunk]; mask; mask &= mask - 1, ++place) {
            const int bit = __builtin_ctzll(mask);
            const int64_t row = tile * kTileRows + bit / kTileGroups;
            const int64_t first = (column_tile * kTileGroups + bit % kTileGroups) * weight.size;
            dequantise(weight, place, values);
            for (int64_t token = 0; token < tokens; ++token) {
                const float* inputs = x + token * columns + first;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < weight.size; ++i) sum += values[i] * inputs[i];
                y[token * weight.rows + row] += sum;
            }
        }
    }
}

}  // namespace

// x is [tokens, columns], columns those of the groups, zeros past K; y is [tokens, rows], zeros.
extern "C" void gqs_product(
    const Weight* weight, const float* x, int64_t columns, float* y, int64_t tokens, int threads
) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < weight->row_tiles; ++tile) multiply_tile(*weight, tile, x, columns, y, tokens);
}
