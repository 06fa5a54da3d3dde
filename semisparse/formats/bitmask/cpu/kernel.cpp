// y[M, N] = x[M, K] @ w[N, K].T for a bitmask weight in the layout `rows` (README.md), accumulated in float32.
//
// Threads take bands of 8 rows of w. Each block of 64 columns is expanded in registers and stored to the band's buffer, which
// row_matmul.hpp multiplies with all tokens, so packed bytes come from memory once.

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#define HAS_AVX512
#elif defined(__AVX2__) && defined(__F16C__)
#define HAS_AVX2
#endif
#if defined(HAS_AVX512) || defined(HAS_AVX2)
#include <immintrin.h>
#endif

#if defined(__AVX512VBMI2__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_EXPAND_BYTES
#endif

#include "row_matmul.hpp"
#include "scalars.hpp"

// A call per block would cost as much as the block.
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;
constexpr int kBandRows = 8;  // BAND_ROWS of kernel.py
constexpr int kBlock = 64;
constexpr int kVectors = kBlock / kLanes;

// GCC and clang lower this to one AVX-512, two AVX2 or four SSE / NEON registers.
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

#ifdef HAS_AVX512
__m512 widen16(Float32, const uint32_t* from) { return _mm512_loadu_ps(from); }
__m512 widen16(Float16, const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
__m512 widen16(BFloat16, const uint16_t* from) {
  __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
#endif

#ifdef HAS_AVX2
__m256 widen8(Float32, const uint32_t* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }
__m256 widen8(Float16, const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
__m256 widen8(BFloat16, const uint16_t* from) {
  __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
#endif

#ifdef HAS_AVX2
// For each byte of a mask and each of 8 lanes: the index of the lane's value, or a negative number if its column is not stored.
struct ExpandTable {
  alignas(32) int32_t source[256][8];
  constexpr ExpandTable() : source() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, next = 0; lane < 8; ++lane) source[mask][lane] = mask >> lane & 1 ? next++ : INT32_MIN;
  }
};
constexpr ExpandTable kExpand;

template <typename Type>
inline void expand_octets(uint64_t mask, const typename Type::Stored* values, float* columns) {
#pragma GCC unroll 8
  for (int octet = 0; octet < kBlock / 8; ++octet) {
    const auto* from = values + __builtin_popcountll(mask & ((uint64_t(1) << 8 * octet) - 1));
    __m256i source = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpand.source[mask >> 8 * octet & 0xff]));
    __m256 found = _mm256_permutevar8x32_ps(widen8(Type(), from), source);
    __m256 dead = _mm256_castsi256_ps(_mm256_srai_epi32(source, 31));
    _mm256_store_ps(columns + 8 * octet, _mm256_andnot_ps(dead, found));
  }
}
#endif

// One value at a time; reads no value that it does not store.
template <typename Type>
__attribute__((noinline)) void expand_singly(uint64_t mask, const typename Type::Stored* values, float* columns) {
  std::memset(columns, 0, kBlock * sizeof(float));
  for (; mask; mask &= mask - 1) columns[__builtin_ctzll(mask)] = Type::widen(*values++);
}

// Expands the next values to a block's 64 columns; columns that are not stored ("dead") get zero. Returns the first value that
// was not used.
template <typename Type>
INLINE const typename Type::Stored* expand(uint64_t mask, const typename Type::Stored* values,
                                           const typename Type::Stored* end, Vector (&weights)[kVectors]) {
  const auto* next = values + __builtin_popcountll(mask);
#ifdef HAS_AVX512
  // The vector loads read up to 64 values, used or not.
  if (__builtin_expect(end - values >= kBlock, 1)) {
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) {
      const auto* from = values + __builtin_popcountll(mask & ((uint64_t(1) << kLanes * q) - 1));
      weights[q] = (Vector)_mm512_maskz_expand_ps(__mmask16(mask >> kLanes * q), widen16(Type(), from));
    }
    return next;
  }
#endif
  alignas(sizeof(Vector)) float columns[kBlock];
#ifdef HAS_AVX2
  if (__builtin_expect(end - values >= kBlock, 1))
    expand_octets<Type>(mask, values, columns);
  else
#endif
    expand_singly<Type>(mask, values, columns);
#pragma GCC unroll 4
  for (int q = 0; q < kVectors; ++q) weights[q] = load(columns + q * kLanes);
  return next;
}

// Widens a block's codes to a byte each, in order. Reads the bytes of 64 codes, used or not.
template <int Bits>
inline void separate(const uint8_t* from, uint8_t* codes) {
  if constexpr (Bits == 8) {
    std::memcpy(codes, from, kBlock);
  } else {
    for (int i = 0; i < kBlock / 2; ++i) {
      codes[2 * i] = from[i] & 15;
      codes[2 * i + 1] = from[i] >> 4;
    }
  }
}

// Dequantises a block's 64 columns: codes less that of zero, times the scale; dead columns get 0. Reads as `separate` does.
template <int Bits>
INLINE void dequantise(uint64_t mask, const uint8_t* from, float scale, Vector (&weights)[kVectors]) {
  constexpr int kZero = 1 << (Bits - 1);
#ifdef HAS_EXPAND_BYTES
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  if constexpr (Bits == 8) {
    // code * scale - zero * scale with one rounding: zero is a power of 2, so zero * scale is exact.
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-kZero * scale);
    const __m512i codes = _mm512_mask_expand_epi8(_mm512_set1_epi8(static_cast<char>(kZero)), mask, _mm512_loadu_si512(from));
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) {
      const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(q * kLanes));
      const __m512i integers = _mm512_maskz_permutexvar_epi8(0x1111111111111111, places, codes);
      weights[q] = (Vector)_mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), factor, shift);
    }
  } else {
    // A table of the 16 codes' weights; its index is the low half of a byte, the other may hold anything.
    const __m512 table = _mm512_mul_ps(
        _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8), _mm512_set1_ps(scale));
    __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    codes = _mm512_or_si512(codes, _mm512_slli_epi16(codes, 4));
    codes = _mm512_mask_expand_epi8(_mm512_set1_epi8(kZero), mask, codes);
#pragma GCC unroll 4
    for (int q = 0; q < kVectors; ++q) {
      const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(q * kLanes));
      weights[q] = (Vector)_mm512_permutexvar_ps(_mm512_permutexvar_epi8(places, codes), table);
    }
  }
#else
  uint8_t codes[kBlock + kLanes] = {};  // the last vector load may begin at the last code
  separate<Bits>(from, codes);
  for (int i = 0; i < kBlock; ++i) codes[i] -= kZero;
#ifdef HAS_AVX512
#pragma GCC unroll 4
  for (int q = 0; q < kVectors; ++q) {
    const uint8_t* first = codes + __builtin_popcountll(mask & ((uint64_t(1) << kLanes * q) - 1));
    __m512i integers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
    integers = _mm512_maskz_expand_epi32(__mmask16(mask >> kLanes * q), integers);
    weights[q] = (Vector)_mm512_cvtepi32_ps(integers) * scale;
  }
#else
  alignas(sizeof(Vector)) float columns[kBlock] = {};
#ifdef HAS_AVX2
#pragma GCC unroll 8
  for (int octet = 0; octet < kBlock / 8; ++octet) {
    const uint8_t* first = codes + __builtin_popcountll(mask & ((uint64_t(1) << 8 * octet) - 1));
    __m256i source = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpand.source[mask >> 8 * octet & 0xff]));
    __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)));
    __m256i found = _mm256_permutevar8x32_epi32(integers, source);
    found = _mm256_andnot_si256(_mm256_srai_epi32(source, 31), found);
    _mm256_store_ps(columns + 8 * octet, _mm256_cvtepi32_ps(found));
  }
#else
  for (int i = 0; mask; mask &= mask - 1, ++i) columns[__builtin_ctzll(mask)] = static_cast<int8_t>(codes[i]);
#endif
  for (int q = 0; q < kVectors; ++q) weights[q] = load(columns + q * kLanes) * scale;
#endif
#endif
}

#if defined(HAS_BFLOAT16_PRODUCT) && defined(HAS_EXPAND_BYTES)
#define HAS_BFLOAT16_TABLE
// The same for a block in 4 bits, straight to bfloat16. The table is there twice: an index has 5 bits, of which the code is 4.
INLINE void dequantise_to_bfloat16(uint64_t mask, const uint8_t* from, float scale, uint16_t* columns) {
  const __m512 weights = _mm512_mul_ps(
      _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8), _mm512_set1_ps(scale));
  const __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(weights));
  __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  codes = _mm512_or_si512(codes, _mm512_slli_epi16(codes, 4));
  codes = _mm512_mask_expand_epi8(_mm512_set1_epi8(8), mask, codes);
  const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes));
  const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1));
  _mm512_storeu_si512(columns, _mm512_permutexvar_epi16(low, table));
  _mm512_storeu_si512(columns + 32, _mm512_permutexvar_epi16(high, table));
}
#endif

#ifdef HAS_BFLOAT16_PRODUCT
// Rounds a block's 64 columns to bfloat16.
INLINE void store(const Vector (&weights)[kVectors], uint16_t* columns) {
#pragma GCC unroll 2
  for (int q = 0; q < kVectors; q += 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)weights[q + 1], (__m512)weights[q]);
    std::memcpy(columns + q * kLanes, &both, sizeof both);
  }
}
#endif

INLINE void store(const Vector (&weights)[kVectors], float* columns) {
#pragma GCC unroll 4
  for (int q = 0; q < kVectors; ++q) std::memcpy(columns + q * kLanes, &weights[q], sizeof(Vector));
}

// The same as _Weight in kernel.py.
struct Weight {
  const uint64_t* masks;      // [rows, blocks]
  const void* stored;         // values or codes: [rows, slots], or [kept]
  const void* scale;          // of codes, [rows, blocks]
  const int64_t* row_starts;  // [rows + 1], or null where every row holds `slots` values, or bytes of codes
  int64_t rows, blocks, slots;
  int64_t bits;  // per code; 0 where values are stored
  int64_t type;  // of values and scales: 0 float32, 1 float16, 2 bfloat16

  int64_t start(int64_t row) const { return row_starts ? row_starts[row] : row * slots; }
};

// Reads a row of values from its first block on.
template <typename Type>
struct Values {
  using Entry = typename Type::Stored;
  const Entry *next, *end;

  Values() = default;
  Values(const Weight& weight, int64_t row)
      : next(static_cast<const Entry*>(weight.stored) + weight.start(row)),
        end(static_cast<const Entry*>(weight.stored) + weight.start(weight.rows)) {}

  template <typename Operand>
  INLINE void read(uint64_t mask, Operand* columns) {
#if defined(HAS_BFLOAT16_PRODUCT) && defined(__AVX512VBMI2__)
    if constexpr (std::is_same_v<Type, BFloat16> && std::is_same_v<Operand, uint16_t>) {
      if (__builtin_expect(end - next >= kBlock, 1)) {
        const auto* middle = next + __builtin_popcount(static_cast<uint32_t>(mask));
        _mm512_storeu_si512(columns, _mm512_maskz_expand_epi16(static_cast<__mmask32>(mask), _mm512_loadu_si512(next)));
        _mm512_storeu_si512(columns + 32, _mm512_maskz_expand_epi16(static_cast<__mmask32>(mask >> 32), _mm512_loadu_si512(middle)));
        next += __builtin_popcountll(mask);
        return;
      }
    }
#endif
    Vector weights[kVectors];
    next = expand<Type>(mask, next, end, weights);
    store(weights, columns);
  }
};

// Reads a row of codes from its first block on.
template <typename Type, int Bits>
struct Codes {
  using Entry = uint8_t;
  static constexpr int64_t kBytes = kBlock * Bits / 8;  // of a full block
  const Entry *next, *end;
  const typename Type::Stored* scale;

  Codes() = default;
  Codes(const Weight& weight, int64_t row)
      : next(static_cast<const Entry*>(weight.stored) + weight.start(row)),
        end(static_cast<const Entry*>(weight.stored) + weight.start(weight.rows)),
        scale(static_cast<const typename Type::Stored*>(weight.scale) + row * weight.blocks) {}

  template <typename Operand>
  INLINE void read(uint64_t mask, Operand* columns) {
    const int64_t used = (__builtin_popcountll(mask) * Bits + 7) / 8;
    const float factor = Type::widen(*scale++);
    if (__builtin_expect(end - next >= kBytes, 1)) {
      write(mask, next, factor, columns);
    } else {
      Entry last[kBytes] = {};
      std::memcpy(last, next, used);
      write(mask, last, factor, columns);
    }
    next += used;
  }

 private:
  template <typename Operand>
  static INLINE void write(uint64_t mask, const Entry* from, float factor, Operand* columns) {
#ifdef HAS_BFLOAT16_TABLE
    if constexpr (Bits == 4 && std::is_same_v<Operand, uint16_t>) return dequantise_to_bfloat16(mask, from, factor, columns);
#endif
    Vector weights[kVectors];
    dequantise<Bits>(mask, from, factor, weights);
    store(weights, columns);
  }
};

// Writes a band of rows for multiply_unpacked, and prefetches the next: 4.7 ns per block from memory, 7.0 without (Zen 4).
template <typename Reader, typename Operand>
void unpack_band(const Weight& weight, int64_t first, int64_t count, int64_t stride, Operand* band) {
  const int64_t ahead = weight.start(first + count) - weight.start(first);
  for (int64_t row = 0; row < count; ++row) {
    Reader reader(weight, first + row);
    for (int64_t block = 0; block < weight.blocks; ++block) {
      __builtin_prefetch(reader.next + ahead, 0, 2);
      if constexpr (sizeof(typename Reader::Entry) == 4) __builtin_prefetch(reader.next + ahead + 16, 0, 2);
      reader.read(weight.masks[(first + row) * weight.blocks + block], band + row * stride + block * kBlock);
    }
  }
}

template <typename Reader>
struct ReaderOf {
  using Type = Reader;
};

// Calls `call` with ReaderOf<R>, where R is the type that reads this weight's rows.
template <typename Type, typename Call>
void with_bits(const Weight& weight, Call call) {
  if (weight.bits == 8) return call(ReaderOf<Codes<Type, 8>>());
  if (weight.bits == 4) return call(ReaderOf<Codes<Type, 4>>());
  call(ReaderOf<Values<Type>>());
}

// Calls `call` with the row_matmul.hpp type of the operands, and the weight's reader. Only a bfloat16 weight is multiplied in
// bfloat16: others would lose bits.
template <typename Call>
void with_product(const Weight& weight, bool bfloat16, Call call) {
#ifdef HAS_BFLOAT16_PRODUCT
  if (bfloat16) return with_bits<BFloat16>(weight, [&](auto reader) { call(BFloat16Product(), reader); });
#endif
  with_type(weight.type, [&](auto type) {
    with_bits<decltype(type)>(weight, [&](auto reader) { call(Float32Product(), reader); });
  });
}

}  // namespace

extern "C" {

// y[tokens, rows] = x[tokens, columns] @ w.T; x and y are bfloat16 or float32, x is zero from K on.
void bitmask_matmul(const Weight* weight, const MatmulCall* call) {
  with_product(*weight, call->bfloat16, [=](auto product, auto reader) {
    using Product = decltype(product);
    const auto matrices = call->matrices<typename Product::Operand>();
    multiply_unpacked<Product>(matrices, [&](int64_t row, int64_t count, auto* band) {
      unpack_band<typename decltype(reader)::Type>(*weight, row, count, matrices.stride, band);
    });
  });
}

// Writes rows `first` to `first + count` to [count, stride], float32: bfloat16 is never multiplied by torch.
void bitmask_unpack(const Weight* weight, int64_t first, int64_t count, int64_t stride, void* rows, int threads) {
  with_product(*weight, 0, [=](auto product, auto reader) {
    auto* unpacked = static_cast<typename decltype(product)::Operand*>(rows);
    unpack_rows(first, count, kBandRows, stride, unpacked, threads, [=](int64_t row, int64_t valid, auto* band) {
      unpack_band<typename decltype(reader)::Type>(*weight, row, valid, stride, band);
    });
  });
}

}  // extern "C"
