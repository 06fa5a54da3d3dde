// Divides a step's pairs among experts and jobs: a pair is a token and one of the experts that its router chose, a job is up to
// TILE_M pairs of one expert, in order. Jobs of expert 0 come first, then those of expert 1 ...; pairs of an expert that does not
// exist are in no job.
//
// Grid: a CTA per expert. CTA: kWarps warps; each reads a contiguous part of `chosen` twice. Every CTA counts the pairs of all
// experts (integers in shared memory: the order of the additions does not matter) and so knows where its jobs begin.
//
// Compiled with TILE_M and EXPERT_COUNT (the number of experts).

constexpr int kWarps = 8;
constexpr int kAhead = 8;  // loads in flight per lane: with one, 16,384 pairs took 31 us

// A lane calls take(pair, expert of the pair) for the pairs `first` + lane, `first` + lane + 32, ... before `end`. All lanes of the
// warp make the same number of calls; for a pair from `end` on the expert is -1.
template <typename Take>
__device__ __forceinline__ void for_each_pair(const long long* chosen, int first, int end, const Take& take) {
    for (int i = first + static_cast<int>(threadIdx.x % 32); i - static_cast<int>(threadIdx.x % 32) < end; i += 32 * kAhead) {
        long long experts[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) experts[j] = i + 32 * j < end ? chosen[i + 32 * j] : -1;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) take(i + 32 * j, experts[j]);
    }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) semisparse_route(
    const long long* chosen,  // [pairs], the expert of each
    int* job_count,           // [1]
    int* job_experts,         // [jobs], the expert of each job
    int* job_pairs,           // [jobs, TILE_M], -1 where a job has fewer
    int pairs
) {
    __shared__ int counts[EXPERT_COUNT];  // pairs of each expert
    __shared__ int own_counts[kWarps];    // pairs of this CTA's expert in each warp's part
    __shared__ int jobs[2];               // of experts before this CTA's, and of all
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXPERT_COUNT; i += kWarps * 32) counts[i] = 0;
    if (threadIdx.x < 2) jobs[threadIdx.x] = 0;
    __syncthreads();
    const int part = (pairs + kWarps * 32 - 1) / (kWarps * 32) * 32;
    const int first = warp * part, end = min(first + part, pairs);
    int own = 0;
    for_each_pair(chosen, first, end, [&](int, long long of_pair) {
        if (of_pair >= 0 && of_pair < EXPERT_COUNT) atomicAdd(&counts[of_pair], 1);
        own += __popc(__ballot_sync(0xffffffffu, of_pair == expert));
    });
    if (lane == 0) own_counts[warp] = own;
    __syncthreads();
    for (int i = threadIdx.x; i < EXPERT_COUNT; i += kWarps * 32) {
        const int of_expert = (counts[i] + TILE_M - 1) / TILE_M;
        if (i < expert) atomicAdd(&jobs[0], of_expert);
        atomicAdd(&jobs[1], of_expert);
    }
    __syncthreads();
    const int first_job = jobs[0], count = counts[expert], own_jobs = (count + TILE_M - 1) / TILE_M;
    if (expert == 0 && threadIdx.x == 0) *job_count = jobs[1];
    for (int i = threadIdx.x; i < own_jobs; i += kWarps * 32) job_experts[first_job + i] = expert;
    int* slots = job_pairs + static_cast<long long>(first_job) * TILE_M;
    for (int i = count + threadIdx.x; i < own_jobs * TILE_M; i += kWarps * 32) slots[i] = -1;
    int rank = 0;
    for (int i = 0; i < warp; ++i) rank += own_counts[i];
    for_each_pair(chosen, first, end, [&](int pair, long long of_pair) {
        const unsigned int same = __ballot_sync(0xffffffffu, of_pair == expert);
        if (of_pair == expert) slots[rank + __popc(same & (1u << lane) - 1)] = pair;
        rank += __popc(same);
    });
}
