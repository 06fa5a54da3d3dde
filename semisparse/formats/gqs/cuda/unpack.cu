// Unpacks the weight to w[n, pitch] for cuBLAS, bit for bit as `Packed.unpack`. Dropped groups become zeros; columns from k on
// hold no weights.
//
// Grid: a warp per chunk of 16 rows by 4 groups, WARPS warps per CTA. No shared memory. A lane unpacks vectors of 8 columns (4
// for groups of 4), whose codes are contiguous (README.md, "Layout"). Consecutive lanes have consecutive vectors of a row, so
// that stores are coalesced.
//
// Bound by memory: 78 to 87 % of an H200's bandwidth (docs/kernels/gqs.md).
//
// Macros: SCALAR (__half, __nv_bfloat16 or float; of scale and w), BITS (8, 4, 3 or 2), GROUP_SIZE (columns) and WARPS.

#include "types.cuh"

constexpr int kRows = 16;
constexpr int kVector = GROUP_SIZE < 8 ? GROUP_SIZE : 8;  // columns
constexpr int kVectorBytes = kVector * BITS / 8;          // bytes of a vector's codes
constexpr int kVectorsPerGroup = GROUP_SIZE / kVector;
constexpr int kVectorsPerRow = 4 * kVectorsPerGroup;      // in a chunk
constexpr int kVectorsPerLane = kRows * kVectorsPerRow / 32;
constexpr int kInFlight = kVectorsPerLane < 4 ? kVectorsPerLane : 4;

// The codes of a group's vector as one little-endian number.
__device__ __forceinline__ unsigned long long load_codes(const unsigned char* codes, int group, int vector) {
    const unsigned char* from = codes + (static_cast<long long>(group) * kVectorsPerGroup + vector) * kVectorBytes;
    if constexpr (kVectorBytes == 8) return *reinterpret_cast<const unsigned long long*>(from);
    if constexpr (kVectorBytes == 4) return *reinterpret_cast<const Word*>(from);
    if constexpr (kVectorBytes == 2) return *reinterpret_cast<const unsigned short*>(from);
    if constexpr (kVectorBytes == 3) return from[0] | from[1] << 8 | from[2] << 16;
    return *from;
}

// 2^(15 + BITS) + units * 2^(BITS - 8): the float's ulp is the unit of zero points, so `units` are its lowest bits.
__device__ __forceinline__ float anchored(Word units) { return __uint_as_float((127 + 15 + BITS) << 23 | units); }

// The weight of a vector's column; `zero` is a result of `anchored`.
__device__ __forceinline__ float dequantise(unsigned long long codes, int column, float zero, float scale) {
    const int position = column % 2 ? kVector / 2 + column / 2 : column / 2;
    const Word code = static_cast<Word>(codes >> BITS * position) & ((1u << BITS) - 1);
    return (anchored(code << (8 - BITS)) - zero) * scale;  // the difference is exact
}

template <typename Scalar> __device__ __forceinline__ void store_vector(Scalar* to, const float (&values)[kVector]) {
    Word pairs[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) pairs[i] = pack2(values[2 * i], values[2 * i + 1], to);
    if constexpr (kVector < 8) *reinterpret_cast<uint2*>(to) = uint2{pairs[0], pairs[1]};
    else *reinterpret_cast<uint4*>(to) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ __forceinline__ void store_vector(float* to, const float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
        *reinterpret_cast<float4*>(to + i) = float4{values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) semisparse_gqs_unpack(
    const uint2* __restrict__ masks,          // [chunks], low word first
    const int* __restrict__ starts,           // [chunks + 1]
    const unsigned char* __restrict__ codes,  // [kept, GROUP_SIZE * BITS / 8]
    const SCALAR* __restrict__ scale,         // [kept]
    const unsigned char* __restrict__ zero,   // [kept]
    SCALAR* __restrict__ w,                   // [n, pitch], pitch a multiple of 8
    int n, int pitch, int chunks, int column_tiles
) {
    const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32;
    if (chunk >= chunks) return;
    const uint2 mask = masks[chunk];
    const int start = starts[chunk], kept_in_low = __popc(mask.x);
    const int first_row = chunk / column_tiles * kRows, first_column = chunk % column_tiles * 4 * GROUP_SIZE;
#pragma unroll 1
    for (int first = 0; first < kVectorsPerLane; first += kInFlight) {
        unsigned long long vector_codes[kInFlight];
        float scales[kInFlight], zeros[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int vector = (first + i) * 32 + lane, row = vector / kVectorsPerRow;
            const int bit = row % 8 * 4 + vector % kVectorsPerRow / kVectorsPerGroup;
            const Word half = row < 8 ? mask.x : mask.y;
            const bool kept = half >> bit & 1;
            const int group = start + (row < 8 ? 0 : kept_in_low) + __popc(half & ((1u << bit) - 1));
            vector_codes[i] = kept ? load_codes(codes, group, vector % kVectorsPerGroup) : 0;
            scales[i] = kept ? to_float(scale[group]) : 0.0f;
            zeros[i] = anchored(kept ? zero[group] : 0);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int vector = (first + i) * 32 + lane;
            const int row = first_row + vector / kVectorsPerRow, column = first_column + vector % kVectorsPerRow * kVector;
            float values[kVector];
#pragma unroll
            for (int j = 0; j < kVector; ++j) values[j] = dequantise(vector_codes[i], j, zeros[i], scales[i]);
            if (row < n && column < pitch) store_vector(w + static_cast<long long>(row) * pitch + column, values);
        }
    }
}
