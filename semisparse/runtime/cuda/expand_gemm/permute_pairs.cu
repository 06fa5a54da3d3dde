// Permutes the columns of x for a GEMM of experts: as permute_x.cu does (permuted.cuh), for the pairs of each job
// (stream_k.cuh) in the place of tokens. It gathers the rows of x, stores zeros for the pairs that a job lacks, and zeroes
// gemm.cuh's counters.
//
// Grid: (column tiles / 8 rounded up, TILE_M / kSlots, at least the number of jobs). CTA: 256 threads; a thread permutes word p of
// kSlots pairs and of one tile, for all four t. No shared memory. 28 us for 16,384 pairs of 2,048 columns (H200).
//
// Compiled with TILE_M and BLOCK (a power of two from 2 to 128).

#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = 256;
constexpr int kWords = 32;  // per t and tile
constexpr int kSlots = 8;   // per CTA; their loads are in flight together

// Loads two consecutive values; zeros from column k on.
__device__ __forceinline__ unsigned int load_word(const unsigned short* row, int column, int k, bool aligned) {
    if (aligned) return column < k ? *reinterpret_cast<const unsigned int*>(row + column) : 0;
    const unsigned int low = column < k ? row[column] : 0, high = column + 1 < k ? row[column + 1] : 0;
    return low | high << 16;
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_permute_pairs(
    const unsigned short* __restrict__ x,   // [rows, k]
    const int* __restrict__ job_count,      // [1]
    const int* __restrict__ job_pairs,      // [jobs, TILE_M]
    unsigned char* __restrict__ permuted,   // [jobs, 4 * column_tiles, TILE_M, 128 bytes]
    int* __restrict__ counters,             // [counter_count]
    int pairs_per_x, int k, int column_tiles, int counter_count,
    int aligned                             // whether every row of x begins at a multiple of 4 bytes
) {
    griddepcontrol_launch_dependents();
    const int thread = blockIdx.x * kThreads + threadIdx.x, job = blockIdx.z;
    const int cta = (job * gridDim.y + blockIdx.y) * gridDim.x, ctas = gridDim.x * gridDim.y * gridDim.z;
    for (int i = cta * kThreads + thread; i < counter_count; i += ctas * kThreads) counters[i] = 0;
    const int p = thread % kWords, column_tile = thread / kWords;
    if (column_tile >= column_tiles || job >= *job_count) return;
    const int own = 2 * (column_tile * kWords + p);  // index among all columns of one t
    const int first = own / BLOCK * (4 * BLOCK) + own % BLOCK;
    unsigned int words[kSlots][4] = {};
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        const int pair = job_pairs[job * TILE_M + blockIdx.y * kSlots + i];
        if (pair < 0) continue;
        const unsigned short* row = x + static_cast<long long>(pair / pairs_per_x) * k;
#pragma unroll
        for (int t = 0; t < 4; ++t) words[i][t] = load_word(row, first + t * BLOCK, k, aligned);
    }
    const long long slice = (static_cast<long long>(job) * column_tiles + column_tile) * 4 + p / 8;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        const int slot = blockIdx.y * kSlots + i;
        uint4* row = reinterpret_cast<uint4*>(permuted + (slice * TILE_M + slot) * 128);
        row[(p ^ slot) % 8] = uint4{words[i][0], words[i][1], words[i][2], words[i][3]};
    }
}
