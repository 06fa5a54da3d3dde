// What the tiled GEMMs read beside the packed weight, in one launch: x transposed, and the column information of every stage.
//
// x_t[columns, pitch] is x transposed: a column's tokens are consecutive, so one 16-byte copy brings several to shared
// memory. It is zero past K and M, so the GEMMs need no bounds checks.
//
// Column information: for each tile of rows and stage, where each slot finds its column of x. A whole stage holds all
// columns of its windows (the paper's non-packing). A packed one holds only those that some group of the tile keeps
// (packing, section III-C1): `columns` lists them (the paper's col_info), -1 past the last. It depends on the weight alone,
// not on x. The paper computes it offline; here it runs beside the transposition, which takes longer, so nothing is cached
// that could outlive the weight's tensors.
//
// For gemm_fp32.cu (BYTES 4) `offsets` holds, slot by slot, the byte of the stage's buffer at which the column begins. For
// gemm.cu (BYTES 2) an entry is the column's number in the stage plus 65,536 times the slot's, -1 past the last slot; of
// each 16 entries lane t of four takes 4 t to 4 t + 3. The i-th entries of the four lanes are read together, and their
// columns should differ mod 4. So a stage's slots are sorted by that and given to the reads round-robin: with 16 of 32 columns
// kept, a read then takes 1.34 wavefronts on average (simulated; 1.33 measured), in the order of the columns 1.81.
//
// Grid: `transpose_tiles` CTAs of 64 tokens x 64 columns, then one warp for each task: a packed stage, or a group of a
// whole stage.
// CTA: 256 threads. Shared memory: a tile of x, or for each warp a bit mask of the columns that its stage may take.
// Bound: memory, by the transposition: 24.5 us for 67 MB in float32, 15 in 16 bits (H200).
//
// Macro: BYTES (of an element of x): 2 for gemm.cu, 4 for gemm_fp32.cu.

#include "element.cuh"

constexpr int kWarp = 32;
constexpr int kTile = 64;  // tokens and columns
constexpr int kPitch = kTile + 1;

struct Transposition {
    const Element* x;  // [m, k]
    Element* x_t;      // [columns, pitch]
    int m, k, columns, pitch;
};

// By 16 bytes at a time; rows of x begin at multiples of 16 bytes.
__device__ __forceinline__ void transpose_chunks(const Transposition& task, int tile, Word* shared) {
    constexpr int chunk = 16 / BYTES;         // elements
    constexpr int word = 4 / BYTES;           // elements
    constexpr int pitch = kTile / word + 1;   // words
    constexpr int chunks = kTile / chunk;
    const int across = (task.columns + kTile - 1) / kTile;
    const int first_column = tile % across * kTile;
    const int first_token = tile / across * kTile;
#pragma unroll
    for (int i = threadIdx.x; i < kTile * chunks; i += kThreads) {
        const int token = first_token + i / chunks;
        const int column = first_column + i % chunks * chunk;
        uint4 loaded = {};
        if (token < task.m && column < task.k) {
            loaded = *reinterpret_cast<const uint4*>(task.x + static_cast<long long>(token) * task.k + column);
        }
        Word* to = shared + i / chunks * pitch + i % chunks * 4;
        to[0] = loaded.x;
        to[1] = loaded.y;
        to[2] = loaded.z;
        to[3] = loaded.w;
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTile / word * chunks; i += kThreads) {
        // Four lanes store one column, so that whole sectors are written.
        const int at = i / 4 % (kTile / word);
        const int token = (i % 4 + i / (4 * kTile / word) * 4) * chunk;
        if (first_token + token >= task.pitch) continue;
        Word words[chunk];
#pragma unroll
        for (int j = 0; j < chunk; ++j) words[j] = shared[(token + j) * pitch + at];
#pragma unroll
        for (int part = 0; part < word; ++part) {
            const int column = first_column + at * word + part;
            if (column >= task.columns) continue;
#if BYTES == 2
            const Word halves = part ? 0x7632 : 0x5410;
            const uint4 transposed = {__byte_perm(words[0], words[1], halves), __byte_perm(words[2], words[3], halves),
                                      __byte_perm(words[4], words[5], halves), __byte_perm(words[6], words[7], halves)};
#else
            const uint4 transposed = {words[0], words[1], words[2], words[3]};
#endif
            *reinterpret_cast<uint4*>(task.x_t + static_cast<long long>(column) * task.pitch + first_token + token) =
                transposed;
        }
    }
}

// The same by single elements.
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
            task.x_t[static_cast<long long>(column) * task.pitch + token] = shared[fast * kPitch + slow];
        }
    }
}

struct ColumnInfo {
    const unsigned char* positions;  // [groups, slots]
    int* columns;                    // [row_tiles, stages, stage_columns], or null: whole stages
    int* offsets;                    // [row_tiles, stages, tile_groups, stage_slots]
    int keep, window, groups, slots; // slots of a group
    int length, tile_n, stage_slots, stages, stage_columns, column_bytes;

    __device__ __forceinline__ int tile_groups() const { return max(1, tile_n / length); }

    __device__ __forceinline__ int first_column(int stage) const { return stage * stage_slots / keep * window; }

    // The column of a stage's slot in a group, counted from the stage's first; -1 past the last slot.
    __device__ __forceinline__ int column(int group, int stage, int slot) const {
        const int at = stage * stage_slots + slot;
        if (at >= slots) return -1;
        const int position = positions[static_cast<long long>(min(group, groups - 1)) * slots + at];
        return at / keep * window + position - first_column(stage);
    }

    // Words of a bit mask of the columns that a stage may take.
    __device__ __forceinline__ int mask_words() const { return (((stage_slots - 1) / keep + 2) * window + 31) / 32; }
};

// Counts the columns below `column` whose bits are set.
__device__ __forceinline__ int rank(const Word* mask, int column) {
    int below = __popc(mask[column / 32] & ((1u << column % 32) - 1));
    for (int word = 0; word < column / 32; ++word) below += __popc(mask[word]);
    return below;
}

// A column's number in the stage's buffer: its own, or, packed, its rank among the columns that are kept.
struct Numbering {
    const ColumnInfo& info;
    const Word* mask;

    __device__ __forceinline__ int operator()(int column) const { return info.columns ? rank(mask, column) : column; }
};

// Writes the offsets, or entries, of one group in one stage.
__device__ __forceinline__ void write_offsets(const ColumnInfo& info, const Numbering& number, int group, int stage, int* to) {
    const int lane = threadIdx.x % kWarp;
#if BYTES == 4
    for (int i = lane; i < info.stage_slots; i += kWarp) {
        const int column = info.column(group, stage, i);
        to[i] = column < 0 ? 0 : number(column) * info.column_bytes;
    }
#else
    const Word below = (1u << lane) - 1;
    for (int at = 0; at < info.stage_slots; at += kWarp) {
        const int count = min(kWarp, info.stage_slots - at);  // a multiple of 16
        const int column = lane < count ? info.column(group, stage, at + lane) : -1;
        const int numbered = column < 0 ? 3 : number(column);
        int sorted = 0;  // rank among the slots sorted by their column mod 4
#pragma unroll
        for (int residue = 0; residue < 4; ++residue) {
            const Word same = __ballot_sync(0xffffffffu, lane < count && numbered % 4 == residue);
            if (residue < numbered % 4) sorted += __popc(same);
            if (residue == numbered % 4) sorted += __popc(same & below);
        }
        const int reads = count / 4;
        const int read = sorted % reads;
        const int entry = column < 0 ? -65536 : (at + lane) * 65536 + numbered;
        if (lane < count) to[at + read / 4 * 16 + sorted / reads * 4 + read % 4] = entry;
    }
#endif
}

// Lists the columns of a packed stage that some group keeps.
__device__ __forceinline__ void list_columns(const ColumnInfo& info, int index, int first_group, int stage, Word* mask) {
    const int lane = threadIdx.x % kWarp;
    for (int word = lane; word < info.mask_words(); word += kWarp) mask[word] = 0;
    __syncwarp();
    for (int i = lane; i < info.tile_groups() * info.stage_slots; i += kWarp) {
        const int column = info.column(first_group + i / info.stage_slots, stage, i % info.stage_slots);
        if (column >= 0) atomicOr(mask + column / 32, 1u << column % 32);
    }
    __syncwarp();
    int* columns = info.columns + static_cast<long long>(index) * info.stage_columns;
    const int kept = rank(mask, 32 * info.mask_words() - 1) + (mask[info.mask_words() - 1] >> 31);
    for (int i = kept + lane; i < info.stage_columns; i += kWarp) columns[i] = -1;
    for (int column = lane; column < 32 * info.mask_words(); column += kWarp) {
        if (mask[column / 32] >> column % 32 & 1) columns[rank(mask, column)] = info.first_column(stage) + column;
    }
}

// A warp's task: one group of a whole stage, or all groups of a packed one.
__device__ __forceinline__ void write_column_info(const ColumnInfo& info, int task, Word* mask) {
    const int tile_groups = info.tile_groups();
    const int tasks_per_stage = info.columns ? 1 : tile_groups;
    const int index = task / tasks_per_stage;
    const int stage = index % info.stages;
    const int first_group = static_cast<int>(static_cast<long long>(index / info.stages) * info.tile_n / info.length);
    int* offsets = info.offsets + static_cast<long long>(index) * tile_groups * info.stage_slots;
    if (info.columns) list_columns(info, index, first_group, stage, mask);
    for (int group = task % tasks_per_stage; group < tile_groups; group += tasks_per_stage) {
        write_offsets(info, Numbering{info, mask}, first_group + group, stage, offsets + group * info.stage_slots);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_column_info(
    const Element* __restrict__ x, Element* __restrict__ x_t, int m, int k, int x_columns, int pitch,
    const unsigned char* __restrict__ positions, int* __restrict__ columns, int* __restrict__ offsets,
    int keep, int window, int groups, int slots, int length, int tile_n, int stage_slots, int stages, int stage_columns,
    int column_bytes, int transpose_tiles, int tasks
) {
    extern __shared__ uint4 shared[];
    if (blockIdx.x < transpose_tiles) {
        const Transposition task{x, x_t, m, k, x_columns, pitch};
        if (k % (16 / BYTES) == 0) {
            transpose_chunks(task, blockIdx.x, reinterpret_cast<Word*>(shared));
        } else {
            transpose(task, blockIdx.x, reinterpret_cast<Element*>(shared));
        }
        return;
    }
    const ColumnInfo info{positions, columns, offsets, keep, window, groups, slots,
                          length, tile_n, stage_slots, stages, stage_columns, column_bytes};
    const int warp = threadIdx.x / kWarp;
    const int task = (blockIdx.x - transpose_tiles) * (kThreads / kWarp) + warp;
    if (task < tasks) write_column_info(info, task, reinterpret_cast<Word*>(shared) + warp * info.mask_words());
}
