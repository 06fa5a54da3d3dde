// The tokens of a decode kernel in shared memory, normalised where fusion.cuh says so.
//
// Tokens are copied in units of 8 values. A token has a team of warps, and a lane of it the units first_unit, first_unit + step ...,
// which it reads, adds up squared, and writes back normalised: the only barriers are the one after the squares and the last.

#pragma once

#include "fusion.cuh"

constexpr int kUnitValues = 8;
constexpr int kUnitsAhead = 4;  // whose loads are in flight

// The bytes of a unit that is loaded from global memory; zeros where it lies past the row of k values.
__device__ __forceinline__ uint4 load_x_unit(const SCALAR* row, int unit, int k) {
    return unit * kUnitValues < k ? reinterpret_cast<const uint4*>(row)[unit] : uint4{0, 0, 0, 0};
}

// WARPS_OF_CTA warps stage up to MAX_TOKENS tokens. Constructed before griddepcontrol.wait: it loads the norm's weight.
template <int WARPS_OF_CTA, int MAX_TOKENS>
struct XStage {
    static constexpr int kNormUnits = RMS_NORM ? 2 : 0;  // of the norm's weight, kept in registers; others are read when needed
    static constexpr int kSums = WARPS_OF_CTA > MAX_TOKENS ? WARPS_OF_CTA : MAX_TOKENS;

    const SCALAR* norm_weight;
    int m, k, team, warp_of_team, first_token, first_unit, step;
    uint4 norm[kNormUnits + 1];

    __device__ __forceinline__ XStage(const SCALAR* norm_weight, int m, int k) : norm_weight(norm_weight), m(m), k(k) {
        const int warp = threadIdx.x / 32;
        team = max(WARPS_OF_CTA / m, 1);
        warp_of_team = warp % team, first_token = warp / team;
        first_unit = warp_of_team * 32 + threadIdx.x % 32, step = team * 32;
#pragma unroll
        for (int j = 0; j < kNormUnits; ++j) norm[j] = load_x_unit(norm_weight, first_unit + j * step, k);
    }

    // Copies unit i of token t to the shared-memory address place(t, i), for i below `units`; what lies past k becomes zeros. Ends
    // with a barrier.
    template <typename Place>
    __device__ __forceinline__ void copy(const SCALAR* x, int units, float epsilon, const Place& place) const {
        __shared__ float sums[kSums];
        const int teams = WARPS_OF_CTA / team;
        for (int token = first_token; token < m; token += teams) {
            const SCALAR* row = x + static_cast<long long>(token) * k;
            float squares = 0;
            for (int first = first_unit; first < units; first += kUnitsAhead * step) {
                uint4 loaded[kUnitsAhead];
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) loaded[j] = load_x_unit(row, first + j * step, k);
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) {
                    const uint4 unit = loaded[j];
                    if (first + j * step < units) st_shared_v4(place(token, first + j * step), unit);
                    if (RMS_NORM) squares += squares_of(unit.x) + squares_of(unit.y) + squares_of(unit.z) + squares_of(unit.w);
                }
            }
            if (RMS_NORM) {
                squares = warp_sum(squares);
                if (threadIdx.x % 32 == 0) sums[token * team + warp_of_team] = squares;
            }
        }
        __syncthreads();
        if (!RMS_NORM) return;
        for (int token = first_token; token < m; token += teams) {
            float squares = 0;
            for (int i = 0; i < team; ++i) squares += sums[token * team + i];
            const float scale = rsqrtf(squares / k + epsilon);
            normalise<0>(units, token, scale, place);
        }
        __syncthreads();
    }

    template <int kept, typename Place>
    __device__ __forceinline__ void normalise(int units, int token, float scale, const Place& place) const {
        if constexpr (kept < kNormUnits) {
            const int unit = first_unit + kept * step;
            if (unit < units) normalise_unit(place(token, unit), norm[kept], scale);
            normalise<kept + 1>(units, token, scale, place);
        } else {
            for (int first = first_unit + kNormUnits * step; first < units; first += kUnitsAhead * step) {
                uint4 weight[kUnitsAhead];
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) weight[j] = load_x_unit(norm_weight, first + j * step, k);
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j)
                    if (first + j * step < units) normalise_unit(place(token, first + j * step), weight[j], scale);
            }
        }
    }

    static __device__ __forceinline__ void normalise_unit(Word at, uint4 weight, float scale) {
        Word words[4];
        ld_shared_ordered(words, at);
        st_shared_v4(at, uint4{normalised(words[0], weight.x, scale), normalised(words[1], weight.y, scale),
                               normalised(words[2], weight.z, scale), normalised(words[3], weight.w, scale)});
    }
};
