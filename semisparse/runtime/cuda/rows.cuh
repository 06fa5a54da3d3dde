// Which rows of x and y a CTA's tokens are.
//
// In an ordinary kernel token i is row i of both. With EXPERTS the weight is a stack of experts, [experts * n, k], and a *pair*
// is a token and one of the experts that its router chose: pair p is expert chosen[p] and row p / pairs_per_x of x, and its
// result is row p of y. A CTA has up to `most` pairs of one expert; `Rows` are theirs.
//
// Compiled with EXPERTS (0 if not defined).

#pragma once

#ifndef EXPERTS
#define EXPERTS 0
#endif

struct Rows {
    const int *of_x, *of_y;  // with EXPERTS, in shared memory: the rows of x and y of each of the CTA's pairs; null for one pair
    int only_x, only_y;      // the rows of one pair
    __device__ __forceinline__ long long x(int token) const { return !EXPERTS ? token : of_x ? of_x[token] : only_x; }
    __device__ __forceinline__ long long y(int token) const { return !EXPERTS ? token : of_y ? of_y[token] : only_y; }
};

// A step's pairs, for a kernel whose CTAs take up to `most` at a time. If `most` is 1, blockIdx.y is the number of the CTA's pair;
// else it is the number of an expert, and the CTA has all pairs of that expert.
template <int most>
struct Pairs {
    static constexpr bool by_expert = most > 1;

    const long long* chosen;  // [pairs], the expert of each; pairs of an expert that does not exist are left out
    int pairs, pairs_per_x, experts;

    __device__ __forceinline__ int expert() const {
        return by_expert ? static_cast<int>(blockIdx.y) : static_cast<int>(chosen[blockIdx.y]);
    }

    // The rows of the CTA's pair, if `most` is 1.
    __device__ __forceinline__ Rows own() const {
        const int pair = blockIdx.y;
        return {nullptr, nullptr, pair / pairs_per_x, pair};
    }

    // Finds the pairs of this CTA from its `begin`-th on, up to `most` of them, in order. All threads call it, and all get the
    // number of pairs from `begin` on, which may be more than `most`. Ends with a barrier.
    __device__ __forceinline__ int find(int begin, int* x_rows, int* y_rows) const {
        constexpr int kAhead = 4;  // loads in flight per lane
        __shared__ int found[1];
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x, own = blockIdx.y;
            int rank = -begin;  // of the next pair of the expert
            if constexpr (!by_expert) {
                if (lane == 0) x_rows[0] = own / pairs_per_x, y_rows[0] = own;
                const long long expert = chosen[own];
                rank += expert >= 0 && expert < experts;
            } else {
                for (int first = 0; first < pairs; first += 32 * kAhead) {
                    long long expert[kAhead];
#pragma unroll
                    for (int i = 0; i < kAhead; ++i) {
                        const int pair = first + 32 * i + lane;
                        expert[i] = pair < pairs ? chosen[pair] : -1;
                    }
#pragma unroll
                    for (int i = 0; i < kAhead; ++i) {
                        const int pair = first + 32 * i + lane;
                        const unsigned int same = __ballot_sync(0xffffffffu, expert[i] == own);
                        const int at = rank + __popc(same & (1u << lane) - 1);
                        if (expert[i] == own && at >= 0 && at < most) x_rows[at] = pair / pairs_per_x, y_rows[at] = pair;
                        rank += __popc(same);
                    }
                }
            }
            if (lane == 0) found[0] = rank;
        }
        __syncthreads();
        return found[0];
    }
};
