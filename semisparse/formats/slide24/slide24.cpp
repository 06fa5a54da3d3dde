// y[m, n] = sum_k x[m, k] * w[n, k] for a slide24 weight in rows on a CPU: README.md tells the bytes.
//
// A row is spread over its columns and multiplied with every token while it is in the cache. One thread computes a row, in
// one order, so the number of threads changes no bit; sums of rounded numbers are exact.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "scalars.hpp"

namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kExact = 1 << 16;  // products of two int8 whose sum fits 32 bits

struct Weight {
    const void* values;       // [rows, slots], of `type`
    const uint8_t* metadata;  // [rows, slots / 4]
    const float* of_octet;    // [256]: the values of fp8
    int64_t rows, slots, window;
    int64_t type;             // 0 float32, 1 float16, 2 bfloat16, 3 int8, 4 fp8
};

struct Tokens {
    const void* values;  // [count, columns] of float, or int16_t for int8; columns a multiple of kLanes, zeros past K
    int64_t count, columns;
};

struct RoundedSums {
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

struct ExactSums {
    static double dot(const float* a, const float* b, int64_t columns) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < columns; ++k) sum += static_cast<double>(a[k] * b[k]);
        return sum;
    }

    static double dot(const int16_t* a, const int16_t* b, int64_t columns) {
        int64_t total = 0;
        for (int64_t first = 0; first < columns; first += kExact) {
            const int64_t end = std::min(first + kExact, columns);
            int32_t sum = 0;
            for (int64_t k = first; k < end; ++k) sum += a[k] * b[k];
            total += sum;
        }
        return static_cast<double>(total);
    }
};

// Spreads a row over zeroed columns.
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

template <typename Sums, typename Stored, typename Wide, typename Widen>
void multiply_rows(const Weight& weight, const Tokens& x, double* y, int threads, Widen widen) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<Wide> columns(x.columns);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < weight.rows; ++row) {
            std::fill(columns.begin(), columns.end(), Wide(0));
            spread<Stored>(weight, row, columns.data(), widen);
            for (int64_t token = 0; token < x.count; ++token) {
                const Wide* of_token = static_cast<const Wide*>(x.values) + token * x.columns;
                y[token * weight.rows + row] = Sums::dot(columns.data(), of_token, x.columns);
            }
        }
    }
}

void product(const Weight& weight, const Tokens& x, double* y, int threads) {
    if (weight.type == 3) {
        multiply_rows<ExactSums, int8_t, int16_t>(weight, x, y, threads, [](int8_t stored) { return stored; });
    } else if (weight.type == 4) {
        const auto widen = [&](uint8_t stored) { return weight.of_octet[stored]; };
        multiply_rows<ExactSums, uint8_t, float>(weight, x, y, threads, widen);
    } else {
        with_type(weight.type, [&](auto type) {
            using Type = decltype(type);
            multiply_rows<RoundedSums, typename Type::Stored, float>(weight, x, y, threads, Type::widen);
        });
    }
}

}  // namespace

// y is [tokens, rows]. Scales are not applied.
extern "C" void slide24_product(const Weight* weight, const Tokens* x, double* y, int threads) {
    product(*weight, *x, y, threads);
}
