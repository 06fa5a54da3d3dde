// What the products need beside the packed weight, in one launch: x transposed, and where each slot finds its column of x.
//
// The first `tiles` blocks transpose x into `by_column` [columns, pitch], so that a column's tokens are consecutive and one
// 16-byte copy brings several of them to shared memory; what lies past K or M is zero, so the products need no tests.
//
// The other blocks deal with a stage of a product's block of rows, a warp each: `slots` slots of every group in it. A whole
// stage stages all columns of its windows. A packed one stages only those that some group keeps: `columns` lists them (the
// paper's col_info), -1 from the last on. Either way `offsets` gives for each group and slot the byte at which its column
// stands in shared memory. The paper does this once, offline; here it runs beside the transposition, which takes longer,
// and so there is nothing to be kept with a weight and to grow stale when its tensors are written anew.
//
// Compiled for BYTES (2 or 4, of an element of x).

#include "primitives.cuh"

#if BYTES == 2
using Element = unsigned short;
#else
using Element = unsigned int;
#endif

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kTile = 64;  // tokens and columns
constexpr int kPitch = kTile + 1;

struct Transposition {
    const Element* x;    // [m, k]
    Element* by_column;  // [columns, pitch]
    int m, k, columns, pitch;
};

__device__ __forceinline__ void transpose(const Transposition& task, int tile, Element* shared) {
    const int across = (task.columns + kTile - 1) / kTile;
    const int first_column = tile % across * kTile;
    const int first_token = tile / across * kTile;
    const int fast = threadIdx.x % kTile;
    for (int slow = threadIdx.x / kTile; slow < kTile; slow += kThreads / kTile) {
        const int token = first_token + slow;
        const int column = first_column + fast;
        const bool inside = token < task.m && column < task.k;
        shared[slow * kPitch + fast] = inside ? task.x[static_cast<long long>(token) * task.k + column] : Element(0);
    }
    __syncthreads();
    for (int slow = threadIdx.x / kTile; slow < kTile; slow += kThreads / kTile) {
        const int token = first_token + fast;
        const int column = first_column + slow;
        if (token < task.pitch && column < task.columns) {
            task.by_column[static_cast<long long>(column) * task.pitch + token] = shared[fast * kPitch + slow];
        }
    }
}

struct Staging {
    const unsigned char* positions;  // [groups, total]
    int* columns;                    // [row_blocks, stages, capacity], or null: whole stages
    int* offsets;                    // [row_blocks, stages, groups_of_block, slots]
    int keep, window, groups, total; // total: slots of a group
    int length, rows_of_block, slots, stages, capacity, row_bytes;

    __device__ __forceinline__ int groups_of_block() const { return max(1, rows_of_block / length); }

    __device__ __forceinline__ int first_column(int stage) const { return stage * slots / keep * window; }

    // The column that slot `slot` of a stage takes in group `group`, counted from the stage's first; -1 past the last slot.
    __device__ __forceinline__ int column(int group, int stage, int slot) const {
        const int at = stage * slots + slot;
        if (at >= total) return -1;
        const int position = positions[static_cast<long long>(min(group, groups - 1)) * total + at];
        return at / keep * window + position - first_column(stage);
    }

    // Words of a bit mask of the columns that a stage may take.
    __device__ __forceinline__ int words() const { return (((slots - 1) / keep + 2) * window + 31) / 32; }
};

// How many columns below `column` are marked.
__device__ __forceinline__ int rank(const Word* marks, int column) {
    int below = __popc(marks[column / 32] & ((1u << column % 32) - 1));
    for (int word = 0; word < column / 32; ++word) below += __popc(marks[word]);
    return below;
}

__device__ __forceinline__ void find_columns(const Staging& task, int index, Word* marks) {
    const int lane = threadIdx.x % kWarp;
    const int of_block = task.groups_of_block();
    const int stage = index % task.stages;
    const int first_group = static_cast<int>(static_cast<long long>(index / task.stages) * task.rows_of_block / task.length);
    int* offsets = task.offsets + static_cast<long long>(index) * of_block * task.slots;
    const bool packed = task.columns != nullptr;
    if (packed) {
        for (int word = lane; word < task.words(); word += kWarp) marks[word] = 0;
        __syncwarp();
        for (int i = lane; i < of_block * task.slots; i += kWarp) {
            const int column = task.column(first_group + i / task.slots, stage, i % task.slots);
            if (column >= 0) atomicOr(marks + column / 32, 1u << column % 32);
        }
        __syncwarp();
    }
    for (int i = lane; i < of_block * task.slots; i += kWarp) {
        const int column = task.column(first_group + i / task.slots, stage, i % task.slots);
        offsets[i] = column < 0 ? 0 : (packed ? rank(marks, column) : column) * task.row_bytes;
    }
    if (!packed) return;
    int* columns = task.columns + static_cast<long long>(index) * task.capacity;
    const int marked = rank(marks, 32 * task.words() - 1) + (marks[task.words() - 1] >> 31);
    for (int i = marked + lane; i < task.capacity; i += kWarp) columns[i] = -1;
    for (int column = lane; column < 32 * task.words(); column += kWarp) {
        if (marks[column / 32] >> column % 32 & 1) columns[rank(marks, column)] = task.first_column(stage) + column;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_prepare(
    const Element* __restrict__ x, Element* __restrict__ by_column, int m, int k, int columns, int pitch,
    const unsigned char* __restrict__ positions, int* __restrict__ packed_columns, int* __restrict__ offsets,
    int keep, int window, int groups, int total, int length, int rows_of_block, int slots, int stages, int capacity,
    int row_bytes, int tiles, int tables  // tables: row blocks * stages
) {
    extern __shared__ uint4 shared[];
    if (blockIdx.x < tiles) {
        transpose(Transposition{x, by_column, m, k, columns, pitch}, blockIdx.x, reinterpret_cast<Element*>(shared));
        return;
    }
    const Staging task{positions, packed_columns, offsets, keep, window, groups, total,
                       length, rows_of_block, slots, stages, capacity, row_bytes};
    const int warp = threadIdx.x / kWarp;
    const int index = (blockIdx.x - tiles) * (kThreads / kWarp) + warp;
    if (index < tables) find_columns(task, index, reinterpret_cast<Word*>(shared) + warp * task.words());
}
