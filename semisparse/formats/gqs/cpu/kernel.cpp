// y[m, n] = sum_k x[m, k] * w[n, k] on a CPU, straight from the bytes on disk (README.md, "Layout"), accumulated in float32.
//
// A thread dequantises a row tile (16 rows) to a buffer, which row_matmul.hpp multiplies with all tokens.

#include <cstdint>
#include <cstring>

#include "row_matmul.hpp"
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

// Widens the scales and zero points of a chunk's groups, `count` from `group` on.
inline void widen_chunk(const Weight& weight, int64_t group, int count, float* scales, float* zeros) {
    with_type(weight.type, [&](auto type) {
        const auto* stored = static_cast<const typename decltype(type)::Stored*>(weight.scale) + group;
        for (int i = 0; i < count; ++i) scales[i] = type.widen(stored[i]);
    });
    const float unit = from_bits(static_cast<uint32_t>(weight.bits + 119) << 23);  // 2^(bits - 8)
    for (int i = 0; i < count; ++i) zeros[i] = static_cast<float>(weight.zero[group + i]) * unit;
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

template <typename Floats>
inline void store(const Floats& values, float* columns) {
    std::memcpy(columns, &values, sizeof values);
}

#ifdef HAS_BFLOAT16_PRODUCT
inline void store(const Vector<4>::Floats& values, uint16_t* columns) {
    const __m128bh rounded = _mm256_cvtneps_pbh(_mm256_zextps128_ps256((__m128)values));
    std::memcpy(columns, &rounded, 4 * sizeof *columns);
}
inline void store(const Vector<8>::Floats& values, uint16_t* columns) {
    const __m128bh rounded = _mm256_cvtneps_pbh((__m256)values);
    std::memcpy(columns, &rounded, sizeof rounded);
}
inline void store(const Floats16& values, uint16_t* columns) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
    std::memcpy(columns, &rounded, sizeof rounded);
}
#endif

#if defined(__AVX512F__)
#define HAS_TABLE
// A group's 4-bit codes index a table of their 16 weights. An index is the low bits of its lane; the others may be anything.
inline __m512 table_of(float zero, float scale) {
    const __m512 ramp = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mul_ps(_mm512_sub_ps(ramp, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
}

template <typename Operand>
inline void unpack_by_table(const uint8_t* codes, __m512 table, int64_t size, Operand* columns) {
    const __m512i words = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shifts = _mm512_set_epi32(28, 12, 24, 8, 20, 4, 16, 0, 28, 12, 24, 8, 20, 4, 16, 0);
    for (int64_t first = 0; first < size; first += 16, codes += 8) {
        const __m512i number = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
        const __m512i indices = _mm512_srlv_epi32(_mm512_permutexvar_epi32(words, number), shifts);
        store((Floats16)_mm512_permutexvar_ps(indices, table), columns + first);
    }
}

#ifdef HAS_BFLOAT16_PRODUCT
// Groups of 32 columns and more: the table is rounded once, not every weight.
inline void unpack_by_rounded_table(const uint8_t* codes, __m512 table, int64_t size, uint16_t* columns) {
    const __m512i words = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i shifts = _mm512_broadcast_i32x4(_mm_set_epi16(12, 12, 8, 8, 4, 4, 0, 0));
    const __m512i twice = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(table));  // an index has 5 bits here, of which the code is 4
    for (int64_t first = 0; first < size; first += 32, codes += 16) {
        const __m512i number = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        const __m512i indices = _mm512_srlv_epi16(_mm512_permutexvar_epi32(words, number), shifts);
        _mm512_storeu_si512(columns + first, _mm512_permutexvar_epi16(indices, twice));
    }
}
// Two groups of 16 columns, whose tables are the halves of one.
inline void unpack_two_by_table(const uint8_t* codes, const float* zeros, const float* scales, uint16_t* first, uint16_t* second) {
    const __m512i words = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i shifts = _mm512_broadcast_i32x4(_mm_set_epi16(12, 12, 8, 8, 4, 4, 0, 0));
    const __m512i halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(table_of(zeros[1], scales[1]), table_of(zeros[0], scales[0]));
    const __m512i number = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m512i shifted = _mm512_srlv_epi16(_mm512_permutexvar_epi32(words, number), shifts);
    const __m512i indices = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(15), halves, 0xea);  // (a & b) | c
    const __m512i values = _mm512_permutexvar_epi16(indices, table);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(values));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(values, 1));
}
#endif
#endif

// Dequantises a group, of which `codes` are the stored bytes.
template <int kBits, int kLanes, typename Operand>
inline void unpack_group(const uint8_t* codes, float zero, float scale, int64_t size, Operand* columns) {
#ifdef HAS_TABLE
    if constexpr (kBits == 4 && kLanes == 8) {
#ifdef HAS_BFLOAT16_PRODUCT
        if constexpr (sizeof(Operand) == 2)
            if (size % 32 == 0) return unpack_by_rounded_table(codes, table_of(zero, scale), size, columns);
#endif
        if (size == 16) return unpack_by_table(codes, table_of(zero, scale), 16, columns);  // without a loop
        if (size % 16 == 0) return unpack_by_table(codes, table_of(zero, scale), size, columns);
    }
#endif
    for (int64_t first = 0; first < size; first += kLanes, codes += kLanes * kBits / 8)
        store(dequantise<kBits, kLanes>(codes, zero, scale), columns + first);
}

// Writes a row tile to `band`, [kRows, stride].
template <int kBits, int kLanes, typename Operand>
void unpack_tile(const Weight& weight, int64_t tile, int64_t stride, Operand* band) {
    const int64_t first_chunk = tile * weight.column_tiles, bytes = weight.size * kBits / 8;
    int64_t group = weight.starts[first_chunk];
    for (int64_t chunk = 0; chunk < weight.column_tiles; ++chunk) {
        Operand* chunk_columns = band + chunk * kChunkGroups * weight.size;
        const auto group_columns = [&](int bit) {
            return chunk_columns + bit / kChunkGroups * stride + bit % kChunkGroups * weight.size;
        };
        const uint64_t mask = weight.masks[first_chunk + chunk];
        if (mask != ~uint64_t(0))
            for (int row = 0; row < kRows; ++row)
                for (int64_t first = 0; first < kChunkGroups * weight.size; first += 16)
                    std::memset(chunk_columns + row * stride + first, 0, 16 * sizeof(Operand));
        float scales[kRows * kChunkGroups], zeros[kRows * kChunkGroups];
        widen_chunk(weight, group, __builtin_popcountll(mask), scales, zeros);
        const float *scale = scales, *zero = zeros;
        uint64_t kept = mask;
#ifdef HAS_BFLOAT16_PRODUCT
        if constexpr (kBits == 4 && kLanes == 8 && sizeof(Operand) == 2)
            for (; weight.size == 16 && (kept & (kept - 1)); group += 2, zero += 2, scale += 2) {
                const int first = __builtin_ctzll(kept), second = __builtin_ctzll(kept &= kept - 1);
                kept &= kept - 1;
                unpack_two_by_table(weight.codes + group * bytes, zero, scale, group_columns(first), group_columns(second));
            }
#endif
        for (; kept; kept &= kept - 1, ++group) {
            unpack_group<kBits, kLanes>(weight.codes + group * bytes, *zero++, *scale++, weight.size,
                                        group_columns(__builtin_ctzll(kept)));
        }
    }
}

template <typename Operand>
using UnpackTile = void (*)(const Weight&, int64_t, int64_t, Operand*);

template <int kBits, typename Operand>
UnpackTile<Operand> unpack_of(int64_t size) {
    return size == 4 ? unpack_tile<kBits, 4, Operand> : unpack_tile<kBits, 8, Operand>;
}

// Returns the function that unpacks a row tile of this weight.
template <typename Operand>
UnpackTile<Operand> unpack_of(const Weight& weight) {
    if (weight.bits == 8) return unpack_of<8, Operand>(weight.size);
    if (weight.bits == 4) return unpack_of<4, Operand>(weight.size);
    if (weight.bits == 3) return unpack_of<3, Operand>(weight.size);
    return unpack_of<2, Operand>(weight.size);
}

// Calls `call` with the row_matmul.hpp type of the operands.
template <typename Call>
void with_product(bool bfloat16, Call call) {
#ifdef HAS_BFLOAT16_PRODUCT
    if (bfloat16) return call(BFloat16Product());
#endif
    call(Float32Product());
}

}  // namespace

extern "C" {

// y[tokens, rows] = x[tokens, columns] @ w.T; x and y are bfloat16 or float32, x is zero from K on.
void gqs_matmul(const Weight* weight, const MatmulCall* call) {
    with_product(call->bfloat16, [=](auto product) {
        using Product = decltype(product);
        const auto matrices = call->matrices<typename Product::Operand>();
        const auto unpack = unpack_of<typename Product::Operand>(*weight);
        multiply_unpacked<Product>(matrices, [&](int64_t row, int64_t count, auto* band) {
            for (int64_t r = 0; r < count; r += kRows) unpack(*weight, (row + r) / kRows, matrices.stride, band + r * matrices.stride);
        });
    });
}

// Writes rows `first` to `first + count` to [count, stride], float32; `rows` has room for whole row tiles.
void gqs_unpack(const Weight* weight, int64_t first, int64_t count, int64_t stride, void* rows, int threads) {
    with_product(0, [=](auto product) {
        using Operand = typename decltype(product)::Operand;
        const auto unpack = unpack_of<Operand>(*weight);
        unpack_rows(first, count, kRows, stride, static_cast<Operand*>(rows), threads,
                    [=](int64_t row, int64_t, auto* band) { unpack(*weight, row / kRows, stride, band); });
    });
}

}  // extern "C"
