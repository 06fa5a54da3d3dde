// Multiplies a k-tile of ROW_TILES row tiles by mma.m16n8k16, in one of two ways.
//
// MULTIPLY_CODES: the codes themselves are multiplied, and scale and zero point are applied to the sums of a group, in float32:
//
//     y += scale * (sum(code x) - zero sum(x))
//
// A code is put into a 16-bit number: as a subnormal half, code * 2^-24, or as 128 + code in bfloat16. To save shifts, the second
// k-step of a unit leaves codes at higher bits of the mantissa, where they count 2^kSetShift times as much; its accumulators are a
// second "set". sum(x) is an mma whose A is all ones. The weight is not rounded to 16 bits.
//
// Otherwise codes become weights in x's dtype (gemm_dequantise.cuh), bit for bit those of `unpack`.

#pragma once

#include "full_weight.cuh"
#include "full_x.cuh"
#include "gemm_dequantise.cuh"
#include "ptx/mma.cuh"

constexpr int kTokenTiles = TILE_M / 8;
using Accumulators = float[ROW_TILES][kTokenTiles][4];

#if MULTIPLY_CODES

// `spread` puts pair i of a unit's codes at bit BITS * i of each half of a word. The first k-step takes pairs 0 and 1, the second
// 2 and 3. Codes of set 0 begin at bit 0, those of set 1 at bit kSetShift, if the mantissa (10 bits, or 7 in bfloat16) has room.
constexpr int kSets = kHalf || BITS < 4 ? 2 : 1;
constexpr int kSetShift = BITS == 2 || (BITS == 3 && kHalf) ? 2 * BITS : BITS;
constexpr Word kPairMask = ((1u << BITS) - 1) * 0x10001u;
constexpr Word kAnchor = kHalf ? 0 : 0x43004300u;  // what codes are OR'ed to: 0 in half (subnormals), 128 in bfloat16
constexpr float kCodeUnit = kHalf ? 1.0f / (1 << 24) : 1.0f;                     // value of code 1, less the anchor
constexpr float kSetFactor = kSets == 2 ? 1.0f / (1 << kSetShift) : 1.0f;        // scales set 1 to set 0
constexpr Word kOnes = kHalf ? 0x3c003c00u : 0x3f803f80u;                        // a pair of 1.0

// Puts a unit's codes into 16-bit numbers, pair i of columns into numbers[i].
// `anchor` is kAnchor in a register: an instruction takes only one constant.
__device__ __forceinline__ void place_codes(Word (&numbers)[4], const Word (&codes)[kPieceWords], int unit, Word anchor) {
    constexpr Word kUpper = kPairMask << kSetShift;
    const Word first = spread(codes, unit), next = first >> BITS;
    numbers[0] = first & kPairMask | anchor, numbers[1] = next & kPairMask | anchor;
    if constexpr (kSets == 1) {
        numbers[2] = first >> 2 * BITS & kPairMask | anchor, numbers[3] = first >> 3 * BITS & kPairMask | anchor;
    } else if constexpr (kSetShift == 2 * BITS) {
        numbers[2] = first & kUpper | anchor, numbers[3] = next & kUpper | anchor;
    } else {
        numbers[2] = next & kUpper | anchor, numbers[3] = first >> 2 * BITS & kUpper | anchor;
    }
}

// Sums of a group: of codes times x, and of x, by set.
struct GroupSums {
    float codes[ROW_TILES][kTokenTiles][kSets][4];
    float x[kTokenTiles][kSets][4];  // the same in all rows

    // Adds a segment of all row tiles; its columns are of one group.
    __device__ __forceinline__ void add(const WeightRead& read, const X& all_x, Word stage, Word x_at, int segment, Word anchor) {
        Codes stored[ROW_TILES];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) read_codes(stored[i], read, stage, i, segment);
        const Word ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int unit = 0; unit < kUnitsPerSegment; ++unit) {
            Word b[kTokenTiles][4];
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
                all_x.load(b[j], x_at, segment * kUnitsPerSegment + unit, j);
                mma_m16n8k16(x[j][0], ones, b[j][0], b[j][1], kElement);
                mma_m16n8k16(x[j][kSets - 1], ones, b[j][2], b[j][3], kElement);
            }
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i) {
                Word upper[4], lower[4];
                place_codes(upper, stored[i][0], unit, anchor);
                place_codes(lower, stored[i][1], unit, anchor);
                const Word first[4] = {upper[0], lower[0], upper[1], lower[1]};
                const Word second[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
                for (int j = 0; j < kTokenTiles; ++j) {
                    mma_m16n8k16(codes[i][j][0], first, b[j][0], b[j][1], kElement);
                    mma_m16n8k16(codes[i][j][kSets - 1], second, b[j][2], b[j][3], kElement);
                }
            }
        }
    }

    // Adds scale * (sum(code x) - zero sum(x)) to the accumulators. The stored zero point counts units of 2^(BITS - 8) codes.
    // In bfloat16 the anchor's share, 128 sum(x), is subtracted, too.
    __device__ __forceinline__ void apply(Accumulators& accumulators, const WeightRead& read, Word stage, Word skew,
                                          int group) const {
        float zero_sums[kTokenTiles][2], anchor_sums[kTokenTiles][2];
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
            for (int token = 0; token < 2; ++token) {
                const float first = x[j][0][token], second = kSets == 2 ? x[j][1][token] : 0.0f;
                zero_sums[j][token] = (first + second) * (kCodeUnit / (1 << 8 - BITS));
                anchor_sums[j][token] = kHalf ? 0.0f : 128.0f * (first + kSetFactor * second);
            }
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const StoredGroup stored(read, stage, i, half, skew, group);
                const float scale = scale_of(stored.scale, kElement) * (1.0f / kCodeUnit);
                const float zero = __uint_as_float(0x4b000000u | stored.zero) - 8388608.0f;  // 2^23 + zero, - 2^23
#pragma unroll
                for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
                    for (int token = 0; token < 2; ++token) {
                        const int at = 2 * half + token;
                        float sum = codes[i][j][0][at];
                        if (kSets == 2) sum += codes[i][j][kSets - 1][at] * kSetFactor;
                        if (!kHalf) sum -= anchor_sums[j][token];
                        sum -= zero * zero_sums[j][token];
                        accumulators[i][j][at] += scale * sum;
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ float scale_of(Word bits, const __half*) {
        return to_float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
    static __device__ __forceinline__ float scale_of(Word bits, const __nv_bfloat16*) { return __uint_as_float(bits << 16); }
};

__device__ __forceinline__ void multiply_k_tile(Accumulators& accumulators, const WeightRead& read, const X& x, Word stage, Word x_at,
                                                Word skew, Word anchor) {
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
        GroupSums sums = {};
        sums.add(read, x, stage, x_at, segment, anchor);
        sums.apply(accumulators, read, stage, skew, segment);
    }
}

#else

constexpr Word kAnchor = 0;  // not used
constexpr int kLaneGroups = GROUP_SIZE < kPiece ? kPiece / GROUP_SIZE : 1;  // of a lane in a row of a k-tile

__device__ __forceinline__ void multiply_k_tile(Accumulators& accumulators, const WeightRead& read, const X& x, Word stage, Word x_at,
                                                Word skew, Word anchor) {
    Codes stored[ROW_TILES];
    ScaleZero groups[ROW_TILES][2][kLaneGroups];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
        read_codes(stored[i], read, stage, i, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < kLaneGroups; ++j) {
                const StoredGroup group(read, stage, i, half, skew, read.column * kPiece / GROUP_SIZE + j);
                groups[i][half][j] = prepare(group.scale, group.zero, kElement);
            }
        }
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
        Word upper[ROW_TILES][4], lower[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            const int group = unit * kUnitColumns * kLaneGroups / kPiece;
            dequantise(upper[i], stored[i][0], unit, groups[i][0][group]);
            dequantise(lower[i], stored[i][1], unit, groups[i][1][group]);
        }
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
            Word b[4];
            x.load(b, x_at, unit, j);
#pragma unroll
            for (int step = 0; step < 4; step += 2) {
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) {
                    const Word a[4] = {upper[i][step], lower[i][step], upper[i][step + 1], lower[i][step + 1]};
                    mma_m16n8k16(accumulators[i][j], a, b[step], b[step + 1], kElement);
                }
            }
        }
    }
}

#endif
