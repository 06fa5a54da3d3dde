// y[m, n] = sum_k x[m, k] * w[n, k] on a CPU, for a slide24 weight in the layout on disk (README.md). The caller applies the
// scales of quantised weights and tokens.
//
// A thread expands a row of w to a dense row in `scratch` and multiplies it by every token while it is in the cache. The number
// of threads does not change the order of a sum, so it changes no bit; sums of quantised numbers are exact. Nothing is
// allocated, so no exception can arise.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scalars.hpp"

namespace {

constexpr int64_t kLanes = 32;               // columns per iteration of Float32Dot; tokens are padded to a multiple
constexpr int64_t kInt32Products = 1 << 16;  // this many products of two int8 have a sum that fits 32 bits

struct Weight {
    const void* values;       // [rows, slots], of `type`
    const uint8_t* metadata;  // [rows, slots / 4]
    const float* fp8_values;  // [256]: the float8_e4m3fn value of each byte
    int64_t rows, slots;      // slots per row
    int64_t window;           // columns per group, which has window - 2 slots
    int64_t type;             // 0 float32, 1 float16, 2 bfloat16, 3 int8, 4 fp8
};

struct Tokens {
    const void* values;  // [count, columns] of float, or int16_t for int8; columns a multiple of kLanes, zeros past K
    int64_t count, columns;
};

// Dot products with float32 sums, for weights that are not quantised.
struct Float32Dot {
    typedef float Vector __attribute__((vector_size(32)));
    static constexpr int kVectors = kLanes / 8;

    static Vector load(const float* from) {
        Vector vector;
        std::memcpy(&vector, from, sizeof vector);
        return vector;
    }

    static double dot(const float* a, const float* b, int64_t columns) {
        Vector sums[kVectors] = {};
        for (int64_t k = 0; k < columns; k += kLanes) {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) sums[i] += load(a + k + 8 * i) * load(b + k + 8 * i);
        }
        const Vector all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float sum = 0;
        for (int i = 0; i < 8; ++i) sum += all[i];
        return sum;
    }
};

// Dot products with exact sums. A product of two fp8 values is a multiple of 2^-18 below 2^18, 36 bits, so a double (53 bits) sums
// 2^17 of them exactly.
struct ExactDot {
    static double dot(const float* a, const float* b, int64_t columns) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < columns; ++k) sum += static_cast<double>(a[k] * b[k]);
        return sum;
    }

    static double dot(const int16_t* a, const int16_t* b, int64_t columns) {
        int64_t total = 0;
        for (int64_t first = 0; first < columns; first += kInt32Products) {
            const int64_t end = std::min(first + kInt32Products, columns);
            int32_t sum = 0;
            for (int64_t k = first; k < end; ++k) sum += a[k] * b[k];
            total += sum;
        }
        return static_cast<double>(total);
    }
};

// Writes the values of a row to their columns in `columns`, which holds zeros.
template <typename Stored, typename Wide, typename Widen>
void spread(const Weight& weight, int64_t row, Wide* columns, Widen widen) {
    const Stored* values = static_cast<const Stored*>(weight.values) + row * weight.slots;
    const uint8_t* metadata = weight.metadata + row * (weight.slots / 4);
    for (int64_t slot = 0; slot < weight.slots; columns += weight.window) {
        for (int64_t first = 0; first < weight.window - 2; first += 2, slot += 2) {
            const int positions = metadata[slot / 4] >> slot % 4 * 2;
            columns[first + (positions & 3)] = widen(values[slot]);
            columns[first + (positions >> 2 & 3)] = widen(values[slot + 1]);
        }
    }
}

template <typename Dot, typename Stored, typename Wide, typename Widen>
void multiply_rows(const Weight& weight, const Tokens& x, void* scratch, double* y, int threads, Widen widen) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
        Wide* columns = static_cast<Wide*>(scratch) + thread * x.columns;
        for (int64_t row = weight.rows * thread / threads; row < weight.rows * (thread + 1) / threads; ++row) {
            std::fill(columns, columns + x.columns, Wide(0));
            spread<Stored>(weight, row, columns, widen);
            for (int64_t token = 0; token < x.count; ++token) {
                const Wide* token_values = static_cast<const Wide*>(x.values) + token * x.columns;
                y[token * weight.rows + row] = Dot::dot(columns, token_values, x.columns);
            }
        }
    }
}

void multiply(const Weight& weight, const Tokens& x, void* scratch, double* y, int threads) {
    if (weight.type == 3) {
        multiply_rows<ExactDot, int8_t, int16_t>(weight, x, scratch, y, threads, [](int8_t stored) { return stored; });
    } else if (weight.type == 4) {
        const auto widen = [&](uint8_t stored) { return weight.fp8_values[stored]; };
        multiply_rows<ExactDot, uint8_t, float>(weight, x, scratch, y, threads, widen);
    } else {
        with_type(weight.type, [&](auto type) {
            using Type = decltype(type);
            multiply_rows<Float32Dot, typename Type::Stored, float>(weight, x, scratch, y, threads, Type::widen);
        });
    }
}

}  // namespace

// y is [tokens, rows]; scratch [threads, columns] of x's type.
extern "C" void slide24_matmul(const Weight* weight, const Tokens* x, void* scratch, double* y, int threads) noexcept {
    multiply(*weight, *x, scratch, y, threads);
}
