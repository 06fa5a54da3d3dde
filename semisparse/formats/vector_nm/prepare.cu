// What the products need beside the packed weight, in one launch: x transposed, and where each slot finds its column of x.
//
// The first `tiles` blocks transpose x into `by_column` [columns, pitch], so that a column's tokens are consecutive and one
// 16-byte copy brings several of them to shared memory; what lies past K or M is zero, so the products need no tests.
//
// The other blocks deal with stages of a product's blocks of rows: `slots` slots of every group in it. A whole
// stage stages all columns of its windows. A packed one stages only those that some group keeps: `columns` lists them (the
// paper's col_info), -1 from the last on. Either way `slots` says for each group and slot where its column stands in shared
// memory. The paper does this once, offline; here it runs beside the transposition, which takes longer, and so there is
// nothing to be kept with a weight and to grow stale when its tensors are written anew.
//
// For simt.cu an entry of `slots` is the byte at which the column begins, slot by slot. For tensor.cu it is the column's number
// in the stage, and 65,536 times the slot's, -1 past the last slot; entry 4 t + r of each 16 is what lanes t of four take
// in round r. A round's four columns are to differ mod 4, so a stage's slots are sorted by that and dealt out to its rounds:
// a read of 16 columns of 32 then takes 1.3 turns at the banks on average, in order of the columns 1.8 (simulated).
//
// Compiled for BYTES (2 or 4, of an element of x): 2 is for tensor.cu.

#include "element.cuh"

constexpr int kWarp = 32;
constexpr int kTile = 64;  // tokens and columns
constexpr int kPitch = kTile + 1;

struct Transposition {
    const Element* x;    // [m, k]
    Element* by_column;  // [columns, pitch]
    int m, k, columns, pitch;
};

// The same by 16 bytes at a time, where rows of x begin at multiples of 16 bytes.
__device__ __forceinline__ void transpose_units(const Transposition& task, int tile, Word* shared) {
    constexpr int unit = 16 / BYTES;          // elements
    constexpr int word = 4 / BYTES;           // elements
    constexpr int pitch = kTile / word + 1;   // words
    constexpr int units = kTile / unit;
    const int across = (task.columns + kTile - 1) / kTile;
    const int first_column = tile % across * kTile;
    const int first_token = tile / across * kTile;
#pragma unroll
    for (int i = threadIdx.x; i < kTile * units; i += kThreads) {
        const int token = first_token + i / units;
        const int column = first_column + i % units * unit;
        uint4 read = {};
        if (token < task.m && column < task.k) {
            read = *reinterpret_cast<const uint4*>(task.x + static_cast<long long>(token) * task.k + column);
        }
        Word* to = shared + i / units * pitch + i % units * 4;
        to[0] = read.x;
        to[1] = read.y;
        to[2] = read.z;
        to[3] = read.w;
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTile / word * units; i += kThreads) {
        // Four lanes write one column, so that whole sectors are written.
        const int at = i / 4 % (kTile / word);
        const int token = (i % 4 + i / (4 * kTile / word) * 4) * unit;
        if (first_token + token >= task.pitch) continue;
        Word read[unit];
#pragma unroll
        for (int j = 0; j < unit; ++j) read[j] = shared[(token + j) * pitch + at];
#pragma unroll
        for (int part = 0; part < word; ++part) {
            const int column = first_column + at * word + part;
            if (column >= task.columns) continue;
#if BYTES == 2
            const Word halves = part ? 0x7632 : 0x5410;
            const uint4 written = {__byte_perm(read[0], read[1], halves), __byte_perm(read[2], read[3], halves),
                                   __byte_perm(read[4], read[5], halves), __byte_perm(read[6], read[7], halves)};
#else
            const uint4 written = {read[0], read[1], read[2], read[3]};
#endif
            *reinterpret_cast<uint4*>(task.by_column + static_cast<long long>(column) * task.pitch + first_token + token) = written;
        }
    }
}

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
    int* entries;                    // [row_blocks, stages, groups_of_block, slots]
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

// Where a column stands in its stage: at its own number, or, packed, at its rank among those marked.
struct Placing {
    const Staging& task;
    const Word* marks;

    __device__ __forceinline__ int operator()(int column) const { return task.columns ? rank(marks, column) : column; }
};

// Writes the entries of one group in one stage.
__device__ __forceinline__ void write_entries(const Staging& task, const Placing& place, int group, int stage, int* to) {
    const int lane = threadIdx.x % kWarp;
#if BYTES == 4
    for (int i = lane; i < task.slots; i += kWarp) {
        const int column = task.column(group, stage, i);
        to[i] = column < 0 ? 0 : place(column) * task.row_bytes;
    }
#else
    const Word below = (1u << lane) - 1;
    for (int at = 0; at < task.slots; at += kWarp) {
        const int count = min(kWarp, task.slots - at);  // a multiple of 16
        const int column = lane < count ? task.column(group, stage, at + lane) : -1;
        const int stands = column < 0 ? 3 : place(column);
        int dealt = 0;
#pragma unroll
        for (int residue = 0; residue < 4; ++residue) {
            const Word same = __ballot_sync(0xffffffffu, lane < count && stands % 4 == residue);
            if (residue < stands % 4) dealt += __popc(same);
            if (residue == stands % 4) dealt += __popc(same & below);
        }
        const int rounds = count / 4;
        const int round = dealt % rounds;
        const int entry = column < 0 ? -65536 : (at + lane) * 65536 + stands;
        if (lane < count) to[at + round / 4 * 16 + dealt / rounds * 4 + round % 4] = entry;
    }
#endif
}

// Lists the columns of a packed stage that some group keeps.
__device__ __forceinline__ void list_columns(const Staging& task, int index, int first_group, int stage, Word* marks) {
    const int lane = threadIdx.x % kWarp;
    for (int word = lane; word < task.words(); word += kWarp) marks[word] = 0;
    __syncwarp();
    for (int i = lane; i < task.groups_of_block() * task.slots; i += kWarp) {
        const int column = task.column(first_group + i / task.slots, stage, i % task.slots);
        if (column >= 0) atomicOr(marks + column / 32, 1u << column % 32);
    }
    __syncwarp();
    int* columns = task.columns + static_cast<long long>(index) * task.capacity;
    const int marked = rank(marks, 32 * task.words() - 1) + (marks[task.words() - 1] >> 31);
    for (int i = marked + lane; i < task.capacity; i += kWarp) columns[i] = -1;
    for (int column = lane; column < 32 * task.words(); column += kWarp) {
        if (marks[column / 32] >> column % 32 & 1) columns[rank(marks, column)] = task.first_column(stage) + column;
    }
}

// Does a warp's part: one group of a whole stage, all groups of a packed one.
__device__ __forceinline__ void find_columns(const Staging& task, int part, Word* marks) {
    const int of_block = task.groups_of_block();
    const int parts = task.columns ? 1 : of_block;
    const int index = part / parts;
    const int stage = index % task.stages;
    const int first_group = static_cast<int>(static_cast<long long>(index / task.stages) * task.rows_of_block / task.length);
    int* entries = task.entries + static_cast<long long>(index) * of_block * task.slots;
    if (task.columns) list_columns(task, index, first_group, stage, marks);
    for (int group = part % parts; group < of_block; group += parts) {
        write_entries(task, Placing{task, marks}, first_group + group, stage, entries + group * task.slots);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_prepare(
    const Element* __restrict__ x, Element* __restrict__ by_column, int m, int k, int columns, int pitch,
    const unsigned char* __restrict__ positions, int* __restrict__ packed_columns, int* __restrict__ entries,
    int keep, int window, int groups, int total, int length, int rows_of_block, int slots, int stages, int capacity,
    int row_bytes, int tiles,
    int parts  // of the second task, as find_columns divides it
) {
    extern __shared__ uint4 shared[];
    if (blockIdx.x < tiles) {
        const Transposition task{x, by_column, m, k, columns, pitch};
        if (k % (16 / BYTES) == 0) {
            transpose_units(task, blockIdx.x, reinterpret_cast<Word*>(shared));
        } else {
            transpose(task, blockIdx.x, reinterpret_cast<Element*>(shared));
        }
        return;
    }
    const Staging task{positions, packed_columns, entries, keep, window, groups, total,
                       length, rows_of_block, slots, stages, capacity, row_bytes};
    const int warp = threadIdx.x / kWarp;
    const int part = (blockIdx.x - tiles) * (kThreads / kWarp) + warp;
    if (part < parts) find_columns(task, part, reinterpret_cast<Word*>(shared) + warp * task.words());
}
