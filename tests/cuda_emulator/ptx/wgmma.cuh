// Stands in for ptx/wgmma.cuh. A lane computes its own accumulators, in float64 (int64) per instruction. With `adverse`,
// products read shared memory as late as the wait for their group.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cvt.cuh"
#include "mma.cuh"
#include "shared.cuh"

inline void wgmma_fence() {}

void wgmma_commit_group();
void wait_for_products(size_t pending);
void defer(void (*compute)(void*), void* product);  // to the wait for the group that is open

template <int pending> void wgmma_wait_group() {
    wait_for_products(pending);
    __syncwarp();  // .sync.aligned: no lane goes on, and releases a stage, before all lanes' products are complete
}

template <typename Product> void issue(Product product) {
    if (!adverse) return product();
    defer([](void* kept) {
        Product* mine = static_cast<Product*>(kept);
        (*mine)();
        delete mine;
    }, new Product(product));
}

enum Swizzle : Long { kNoSwizzle = 0, kSwizzle128 = 1 };

inline Long smem_descriptor(Word address, Word leading, Word stride, Long swizzle) {
    if (swizzle && address % 1024) fail("a swizzled matrix is not aligned");
    return static_cast<Long>((address & 0x3ffff) >> 4) | static_cast<Long>(leading >> 4) << 16 |
           static_cast<Long>(stride >> 4) << 32 | swizzle << 62;
}

inline Word smem_descriptor_low(Word address) { return (address & 0x3ffff) >> 4 | 1u << 16; }
constexpr Word kSmemDescriptorHigh = 64 | 1u << 30;

struct Int8 {};
struct Fp8 {};

template <typename Element> constexpr int size_of_element = 2;
template <> constexpr int size_of_element<Int8> = 1;
template <> constexpr int size_of_element<Fp8> = 1;

template <typename Element> double value_of(const char* from) {
    Element value;
    std::memcpy(&value.bits, from, 2);
    return to_float(value);
}
template <> inline double value_of<Int8>(const char* from) { return static_cast<int8_t>(*from); }
template <> inline double value_of<Fp8>(const char* from) { return e4m3_value(static_cast<unsigned char>(*from)); }

// What a descriptor describes.
struct Matrix {
    Word address, leading, stride;
    bool swizzled;

    explicit Matrix(Long descriptor)
        : address((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
          stride((descriptor >> 32 & 0x3fff) << 4), swizzled(descriptor >> 62) {}

    static const char* at(Word address) { return shared_at(address, 1, 1); }
    static Word swizzle(Word address) { return address ^ (address >> 7 & 7) << 4; }

    // Byte `byte` along K of row (column of b) `row`, K-major.
    const char* k_major(int row, int byte) const {
        if (swizzled) return at(swizzle(address + row / 8 * stride + row % 8 * 128 + byte));
        return at(address + row / 8 * stride + byte / 16 * leading + row % 8 * 16 + byte % 16);
    }

    // Byte `byte` along N of row `row` of K, N-major in runs of 128 bytes.
    const char* n_major(int row, int byte) const {
        return at(swizzle(address + byte / 128 * leading + row / 8 * stride + row % 8 * 128 + byte % 128));
    }
};

inline int row_of(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }           // row of accumulator i, of a warp's 16
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// The fragments of operand a for a lane's rows: those of the four lanes of its quad.
struct Quad {
    Word words[4][4];
    explicit Quad(const Word (&a)[4]) {
        const Warp& all = shown_to_warp(a, 0, 0);
        std::memcpy(words, all.a[threadIdx.x % 32 / 4 * 4], sizeof words);
        __syncwarp();
    }
    template <typename Element> double value(int half, int k) const {
        return element_of<Element>(words[k % 8 / 2][half + k / 8 * 2], k % 2);
    }
};

template <int count, typename Element>
void wgmma_m64k16(float (&d)[count], const Word (&a)[4], Word b, int scale_d, const Element*) {
    const Quad quad(a);
    const Matrix matrix(static_cast<Long>(kSmemDescriptorHigh) << 32 | b);
    issue([=, &d] {
        for (int i = 0; i < count; ++i) {
            double sum = scale_d ? d[i] : 0;
            for (int k = 0; k < 16; ++k)
                sum += quad.value<Element>(i / 2 % 2, k) * value_of<Element>(matrix.k_major(column_of(i), 2 * k));
            d[i] = static_cast<float>(sum);
        }
    });
}

// The two-bit positions of a row's kept values, from the metadata words of a quad.
struct Metadata {
    Word words[4];
    explicit Metadata(Word mine) {
        for (int lane = 0; lane < 4; ++lane) words[lane] = __shfl_sync(~0u, mine, threadIdx.x % 32 / 4 * 4 + lane);
    }
    // 16-bit elements: each lane of the selected pair has eight positions of both rows.
    int of_16_bits(int half, int kept, int selector) const {
        return words[2 * selector + kept / 8] >> (16 * half + 2 * (kept % 8)) & 3;
    }
    // 8-bit elements: each lane has 16 positions of one row.
    int of_8_bits(int half, int kept) const { return words[kept / 16 * 2 + half] >> 2 * (kept % 16) & 3; }
};

template <typename Element>
void wgmma_sp_m64n128k32(float (&d)[64], const Word (&a)[4], Long b, Word metadata, const Element*) {
    const Quad quad(a);
    const Metadata positions(metadata);
    const Matrix matrix(b);
    issue([=, &d] {
        for (int i = 0; i < 64; ++i) {
            double sum = d[i];
            for (int kept = 0; kept < 16; ++kept) {
                const int k = kept / 2 * 4 + positions.of_16_bits(i / 2 % 2, kept, 0);
                sum += quad.value<Element>(i / 2 % 2, kept) * value_of<Element>(matrix.n_major(k, column_of(i) * 2));
            }
            d[i] = static_cast<float>(sum);
        }
    });
}

template <int selector, int count, typename Accumulator, typename Element>
void wgmma_sp_m64(Accumulator (&d)[count], Long a, Long b, Word metadata, int scale_d, const Element*) {
    constexpr int size = size_of_element<Element>, kept = 32 / size;
    const Metadata positions(metadata);
    const Matrix left(a), right(b);
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    issue([=, &d] {
        for (int i = 0; i < count; ++i) {
            double sum = scale_d ? d[i] : 0;
            for (int j = 0; j < kept; ++j) {
                const int half = i / 2 % 2;
                const int position = size == 1 ? positions.of_8_bits(half, j) : positions.of_16_bits(half, j, selector);
                sum += value_of<Element>(left.k_major(warp_row + row_of(i), j * size)) *
                       value_of<Element>(right.k_major(column_of(i), (j / 2 * 4 + position) * size));
            }
            d[i] = static_cast<Accumulator>(sum);
        }
    });
}
