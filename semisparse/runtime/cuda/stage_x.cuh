// Copies the tokens of a decode kernel to shared memory; with RMS_NORM they are normalised there (fusion.cuh).
//
// A team of warps copies a token in units of 8 values: a lane takes the units first_unit, first_unit + step, ... It adds up
// their squares and normalises the same units, so the only barriers are one after the squares and one at the end.

#pragma once

#include "fusion.cuh"
#include "rows.cuh"

constexpr int kUnitValues = 8;
constexpr int kUnitsAhead = 4;  // loads in flight per lane

// Loads a unit from a row of k values in global memory; zeros past its end.
__device__ __forceinline__ uint4 load_x_unit(const SCALAR* row, int unit, int k) {
    return unit * kUnitValues < k ? reinterpret_cast<const uint4*>(row)[unit] : uint4{0, 0, 0, 0};
}

// WARPS_OF_CTA warps stage up to MAX_TOKENS tokens. Constructed before griddepcontrol.wait: it loads the norm's weight.
template <int WARPS_OF_CTA, int MAX_TOKENS>
struct XStage {
    static constexpr int kNormUnits = RMS_NORM ? 2 : 0;  // units of norm_weight that a lane loads early, into registers
    static constexpr int kSums = WARPS_OF_CTA > MAX_TOKENS ? WARPS_OF_CTA : MAX_TOKENS;

    const SCALAR* norm_weight;
    int m, k, team_warps, team_warp, first_token, first_unit, step;
    uint4 norm[kNormUnits + 1];

    __device__ __forceinline__ XStage(const SCALAR* norm_weight, int m, int k) : norm_weight(norm_weight), m(m), k(k) {
        const int warp = threadIdx.x / 32;
        team_warps = max(WARPS_OF_CTA / m, 1);
        team_warp = warp % team_warps, first_token = warp / team_warps;
        first_unit = team_warp * 32 + threadIdx.x % 32, step = team_warps * 32;
#pragma unroll
        for (int j = 0; j < kNormUnits; ++j) norm[j] = load_x_unit(norm_weight, first_unit + j * step, k);
    }

    // Copies each token's units 0 to `units` - 1, zeros past k, to the shared-memory addresses address_of(token, unit). Ends
    // with a barrier.
    template <typename AddressOf>
    __device__ __forceinline__ void copy(const SCALAR* x, Rows rows, int units, float epsilon,
                                         const AddressOf& address_of) const {
        __shared__ float sums[kSums];
        const int teams = WARPS_OF_CTA / team_warps;
        for (int token = first_token; token < m; token += teams) {
            const SCALAR* row = x + rows.x(token) * k;
            float squares = 0;
            for (int first = first_unit; first < units; first += kUnitsAhead * step) {
                uint4 loaded[kUnitsAhead];
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) loaded[j] = load_x_unit(row, first + j * step, k);
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) {
                    const uint4 unit = loaded[j];
                    if (first + j * step < units) st_shared_v4(address_of(token, first + j * step), unit);
                    if (RMS_NORM) squares += squares_of(unit.x) + squares_of(unit.y) + squares_of(unit.z) + squares_of(unit.w);
                }
            }
            if (RMS_NORM) {
                squares = warp_sum(squares);
                if (threadIdx.x % 32 == 0) sums[token * team_warps + team_warp] = squares;
            }
        }
        __syncthreads();
        if (!RMS_NORM) return;
        for (int token = first_token; token < m; token += teams) {
            float squares = 0;
            for (int i = 0; i < team_warps; ++i) squares += sums[token * team_warps + i];
            const float scale = rsqrtf(squares / k + epsilon);
            normalise<0>(units, token, scale, address_of);
        }
        __syncthreads();
    }

    template <int kept, typename AddressOf>
    __device__ __forceinline__ void normalise(int units, int token, float scale, const AddressOf& address_of) const {
        if constexpr (kept < kNormUnits) {
            const int unit = first_unit + kept * step;
            if (unit < units) normalise_unit(address_of(token, unit), norm[kept], scale);
            normalise<kept + 1>(units, token, scale, address_of);
        } else {
            for (int first = first_unit + kNormUnits * step; first < units; first += kUnitsAhead * step) {
                uint4 weight[kUnitsAhead];
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j) weight[j] = load_x_unit(norm_weight, first + j * step, k);
#pragma unroll
                for (int j = 0; j < kUnitsAhead; ++j)
                    if (first + j * step < units) normalise_unit(address_of(token, first + j * step), weight[j], scale);
            }
        }
    }

    static __device__ __forceinline__ void normalise_unit(Word address, uint4 weight, float scale) {
        Word words[4];
        ld_shared_ordered(words, address);
        st_shared_v4(address, uint4{normalised(words[0], weight.x, scale), normalised(words[1], weight.y, scale),
                               normalised(words[2], weight.z, scale), normalised(words[3], weight.w, scale)});
    }
};
