// w[n, pitch] from a gqs weight, for products that need the dense weight. Dropped groups come out as zeros; what stands in a
// row from column k on is not to be read.
//
// A warp takes a chunk. Its lanes write runs of up to 8 columns, one after another along the rows, so that those of several
// lanes fill whole lines of memory.
//
// Compiled for SCALAR (__half, __nv_bfloat16 or float, of scale and w), BITS (8, 4, 3 or 2), SIZE (of a group) and WARPS (of a
// block).

#include "primitives.cuh"

constexpr int kRows = 16;
constexpr int kRun = SIZE < 8 ? SIZE : 8;         // columns whose codes lie together
constexpr int kRunBytes = kRun * BITS / 8;
constexpr int kRunsOfGroup = SIZE / kRun;
constexpr int kRunsOfRow = 4 * kRunsOfGroup;      // of a chunk
constexpr int kRunsOfLane = kRows * kRunsOfRow / 32;
constexpr int kAtOnce = kRunsOfLane < 4 ? kRunsOfLane : 4;

// The codes of a run, the first one lowest.
__device__ __forceinline__ unsigned long long read_codes(const unsigned char* place) {
    if constexpr (kRunBytes == 8) return *reinterpret_cast<const unsigned long long*>(place);
    if constexpr (kRunBytes == 4) return *reinterpret_cast<const Word*>(place);
    if constexpr (kRunBytes == 2) return *reinterpret_cast<const unsigned short*>(place);
    if constexpr (kRunBytes == 3) return place[0] | place[1] << 8 | place[2] << 16;
    return *place;
}

// A float whose last place is the unit of the zero point, 2^(BITS - 8), with a number of such units in it.
__device__ __forceinline__ float anchored(Word units) { return __uint_as_float((127 + 15 + BITS) << 23 | units); }

__device__ __forceinline__ float weight_of(unsigned long long codes, int column, float zero, float scale) {
    const int slot = column % 2 ? kRun / 2 + column / 2 : column / 2;
    const Word code = static_cast<Word>(codes >> BITS * slot) & ((1u << BITS) - 1);
    return (anchored(code << (8 - BITS)) - zero) * scale;  // the difference is exact
}

template <typename Scalar> __device__ __forceinline__ void write_run(Scalar* place, const float (&values)[kRun]) {
    Word pairs[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) pairs[i] = pack2(values[2 * i], values[2 * i + 1], place);
#if SIZE < 8
    *reinterpret_cast<uint2*>(place) = uint2{pairs[0], pairs[1]};
#else
    *reinterpret_cast<uint4*>(place) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
#endif
}

__device__ __forceinline__ void write_run(float* place, const float (&values)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; i += 4) {
        *reinterpret_cast<float4*>(place + i) = float4{values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) semisparse_gqs_unpack(
    const uint2* __restrict__ masks,          // [chunks], low word first
    const int* __restrict__ starts,           // [chunks + 1]
    const unsigned char* __restrict__ codes,  // [kept, SIZE * BITS / 8]
    const SCALAR* __restrict__ scale,         // [kept]
    const unsigned char* __restrict__ zero,   // [kept]
    SCALAR* __restrict__ w,                   // [n, pitch], a row a multiple of 8 values
    int n, int pitch, int chunks, int column_tiles
) {
    const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32;
    if (chunk >= chunks) return;
    const uint2 mask = masks[chunk];
    const int start = starts[chunk], in_low = __popc(mask.x);
    const int first_row = chunk / column_tiles * kRows, first_column = chunk % column_tiles * 4 * SIZE;
#pragma unroll 1
    for (int first = 0; first < kRunsOfLane; first += kAtOnce) {
        unsigned long long found[kAtOnce];
        float step[kAtOnce], point[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int run = (first + i) * 32 + lane, row = run / kRunsOfRow;
            const int bit = row % 8 * 4 + run % kRunsOfRow / kRunsOfGroup;
            const Word half = row < 8 ? mask.x : mask.y;
            const bool kept = half >> bit & 1;
            // Where the group is dropped nothing is read, and zeros are written.
            const int place = start + (row < 8 ? 0 : in_low) + __popc(half & ((1u << bit) - 1));
            found[i] = kept ? read_codes(codes + (static_cast<long long>(place) * kRunsOfGroup + run % kRunsOfGroup) * kRunBytes) : 0;
            step[i] = kept ? to_float(scale[place]) : 0.0f;
            point[i] = anchored(kept ? zero[place] : 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int run = (first + i) * 32 + lane;
            const int row = first_row + run / kRunsOfRow, column = first_column + run % kRunsOfRow * kRun;
            float values[kRun];
#pragma unroll
            for (int j = 0; j < kRun; ++j) values[j] = weight_of(found[i], j, point[i], step[i]);
            if (row < n && column < pitch) write_run(w + static_cast<long long>(row) * pitch + column, values);
        }
    }
}
