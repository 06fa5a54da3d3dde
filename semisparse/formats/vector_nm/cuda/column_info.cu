// One launch computes what the tiled GEMMs read besides the packed weight: x transposed, and the column information of every
// pipeline stage.
//
// x_t[columns, pitch] is x transposed: a column's tokens are consecutive, so one 16-byte copy brings several to shared
// memory. It is zero past K and M, so the GEMMs need no bounds checks.
//
// Column information: for each row tile and each stage, the location in shared memory of the column of x that each slot
// multiplies. A group is `length` rows that keep the same columns; a slot is one kept column of a group. Without packing
// (the paper's non-packing) a stage's buffer holds all columns of the stage's windows. With packing (section III-C1) it holds
// only those that at least one group of the tile keeps: `columns` lists them (the paper's col_info), padded with -1.
// The column information depends on the weight alone, not on x. The paper computes it offline. Here it is recomputed in each
// matmul, at the same time as the transposition, which takes longer. So it costs no time, and no cache can outlive the
// weight's tensors.
//
// For gemm_fp32.cu (BYTES 4) `offsets[slot]` is the byte offset of the slot's column in the stage's buffer; 0 past the last
// slot. For gemm.cu (BYTES 2) an entry is `slot << 16 | column`: the slot's index in the stage and the column's index in the
// stage's buffer. Past the last slot the entry is -65536: slot -1, column 0. Of each 16 entries the lanes with
// lane % 4 == t read entries 4 t to 4 t + 3. One load of x reads the columns of the i-th entries for t = 0 to 3, free of bank
// conflicts if these four columns differ mod 4. So each run of up to 32 slots is sorted by column mod 4 and dealt to the loads
// round-robin. With 16 of 32 columns kept, a load then takes 1.34 wavefronts on average (simulated; measured 1.33);
// unsorted, 1.81.
//
// Grid: `transpose_tiles` CTAs of 64 tokens x 64 columns, then CTAs of eight warps, one warp per task: with packing one stage
// of a row tile, without packing one group of such a stage.
// CTA: 256 threads (kThreads). Dynamic shared memory: a tile of x with one 32-bit word of padding per row; or per warp a bit
// mask of `mask_words()` words, one bit per column that its stage may hold.
// Bound: memory, by the transposition: for M = 2,048, K = 4,096 24.5 us in float32 (67 MB read and written), 15 us in 16
// bits (H200).
//
// Macro: BYTES, of an element of x: 2 for gemm.cu, 4 for gemm_fp32.cu.

#include "element.cuh"

constexpr int kWarp = 32;
constexpr int kTile = 64;          // tokens and columns that a CTA transposes
constexpr int kPitch = kTile + 1;  // elements; the padding avoids bank conflicts

struct TransposeArgs {
    const Element* x;  // [m, k]
    Element* x_t;      // [columns, pitch]
    int m, k, columns, pitch;
};

// Transposes one tile with 16-byte loads and stores. Rows of x must be aligned to 16 bytes.
__device__ __forceinline__ void transpose_chunks(const TransposeArgs& args, int tile, Word* shared) {
    constexpr int chunk_elements = 16 / BYTES;
    constexpr int word_elements = 4 / BYTES;
    constexpr int pitch_words = kTile / word_elements + 1;
    constexpr int chunks = kTile / chunk_elements;  // of a row or column of the tile
    const int column_tiles = (args.columns + kTile - 1) / kTile;
    const int first_column = tile % column_tiles * kTile;
    const int first_token = tile / column_tiles * kTile;
#pragma unroll
    for (int i = threadIdx.x; i < kTile * chunks; i += kThreads) {
        const int token = first_token + i / chunks;
        const int column = first_column + i % chunks * chunk_elements;
        uint4 loaded = {};
        if (token < args.m && column < args.k) {
            loaded = *reinterpret_cast<const uint4*>(args.x + static_cast<long long>(token) * args.k + column);
        }
        Word* destination = shared + i / chunks * pitch_words + i % chunks * 4;
        destination[0] = loaded.x;
        destination[1] = loaded.y;
        destination[2] = loaded.z;
        destination[3] = loaded.w;
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTile / word_elements * chunks; i += kThreads) {
        // Four consecutive lanes have one column word and four consecutive chunks of tokens: they store 64 consecutive bytes
        // of a column, two whole sectors.
        const int column_word = i / 4 % (kTile / word_elements);
        const int token = (i % 4 + i / (4 * kTile / word_elements) * 4) * chunk_elements;
        if (first_token + token >= args.pitch) continue;
        Word words[chunk_elements];
#pragma unroll
        for (int j = 0; j < chunk_elements; ++j) words[j] = shared[(token + j) * pitch_words + column_word];
#pragma unroll
        for (int part = 0; part < word_elements; ++part) {
            const int column = first_column + column_word * word_elements + part;
            if (column >= args.columns) continue;
#if BYTES == 2
            // Takes the low or the high halves of two words: column 2 * column_word or the next.
            const Word selector = part ? 0x7632 : 0x5410;
            const uint4 transposed = {__byte_perm(words[0], words[1], selector), __byte_perm(words[2], words[3], selector),
                                      __byte_perm(words[4], words[5], selector), __byte_perm(words[6], words[7], selector)};
#else
            const uint4 transposed = {words[0], words[1], words[2], words[3]};
#endif
            *reinterpret_cast<uint4*>(args.x_t + static_cast<long long>(column) * args.pitch + first_token + token) =
                transposed;
        }
    }
}

// Transposes one tile element by element, for rows of x that are not aligned to 16 bytes.
__device__ __forceinline__ void transpose(const TransposeArgs& args, int tile, Element* shared) {
    const int column_tiles = (args.columns + kTile - 1) / kTile;
    const int first_column = tile % column_tiles * kTile;
    const int first_token = tile / column_tiles * kTile;
    const int inner = threadIdx.x % kTile;
    for (int outer = threadIdx.x / kTile; outer < kTile; outer += kThreads / kTile) {
        const int token = first_token + outer;
        const int column = first_column + inner;
        const bool inside = token < args.m && column < args.k;
        shared[outer * kPitch + inner] = inside ? args.x[static_cast<long long>(token) * args.k + column] : Element(0);
    }
    __syncthreads();
    for (int outer = threadIdx.x / kTile; outer < kTile; outer += kThreads / kTile) {
        const int token = first_token + inner;
        const int column = first_column + outer;
        if (token < args.pitch && column < args.columns) {
            args.x_t[static_cast<long long>(column) * args.pitch + token] = shared[inner * kPitch + outer];
        }
    }
}

struct ColumnInfo {
    const unsigned char* positions;  // [groups, slots]: column in its window, 0 to window - 1
    int* columns;                    // [row_tiles, stages, stage_columns]: columns of x, or -1; null without packing
    int* offsets;                    // [row_tiles, stages, tile_groups, stage_slots]: byte offsets, or entries
    int keep, window, groups, slots; // slots per group, along all of K
    // Rows per group, rows per CTA tile, slots of each group per stage, stages along K, columns that a stage's buffer has
    // room for, bytes from one column of the buffer to the next.
    int length, tile_n, stage_slots, stages, stage_columns, column_bytes;

    __device__ __forceinline__ int tile_groups() const { return max(1, tile_n / length); }

    __device__ __forceinline__ int first_column(int stage) const { return stage * stage_slots / keep * window; }

    // Returns the column that slot `slot` of the stage has in the group, relative to the stage's first column; -1 past the
    // group's last slot. Groups past the last repeat it: their rows are not stored.
    __device__ __forceinline__ int column(int group, int stage, int slot) const {
        const int at = stage * stage_slots + slot;
        if (at >= slots) return -1;
        const int position = positions[static_cast<long long>(min(group, groups - 1)) * slots + at];
        return at / keep * window + position - first_column(stage);
    }

    // Returns the words of a bit mask with one bit per column that a stage may hold; it may begin and end inside a window.
    __device__ __forceinline__ int mask_words() const { return (((stage_slots - 1) / keep + 2) * window + 31) / 32; }
};

// Counts the columns below `column` whose bits are set.
__device__ __forceinline__ int rank(const Word* mask, int column) {
    int below = __popc(mask[column / 32] & ((1u << column % 32) - 1));
    for (int word = 0; word < column / 32; ++word) below += __popc(mask[word]);
    return below;
}

// Maps a column, relative to the stage's first, to its index in the stage's buffer: without packing the same, with packing
// its rank among the columns that are kept.
struct BufferIndex {
    const ColumnInfo& info;
    const Word* mask;

    __device__ __forceinline__ int operator()(int column) const { return info.columns ? rank(mask, column) : column; }
};

// Writes the byte offsets (BYTES 4) or entries (BYTES 2) of one group in one stage.
__device__ __forceinline__ void write_offsets(const ColumnInfo& info, const BufferIndex& buffer_index, int group, int stage,
                                              int* destination) {
    const int lane = threadIdx.x % kWarp;
#if BYTES == 4
    for (int i = lane; i < info.stage_slots; i += kWarp) {
        const int column = info.column(group, stage, i);
        destination[i] = column < 0 ? 0 : buffer_index(column) * info.column_bytes;
    }
#else
    const Word below = (1u << lane) - 1;
    for (int at = 0; at < info.stage_slots; at += kWarp) {
        const int count = min(kWarp, info.stage_slots - at);  // a multiple of 16, as stage_slots is
        const int column = lane < count ? info.column(group, stage, at + lane) : -1;
        const int in_buffer = column < 0 ? 3 : buffer_index(column);  // slots past the last are sorted last: 3 mod 4
        int sorted_index = 0;  // of the lane's slot among these, sorted by column mod 4
#pragma unroll
        for (int residue = 0; residue < 4; ++residue) {
            const Word same = __ballot_sync(0xffffffffu, lane < count && in_buffer % 4 == residue);
            if (residue < in_buffer % 4) sorted_index += __popc(same);
            if (residue == in_buffer % 4) sorted_index += __popc(same & below);
        }
        const int loads = count / 4;
        const int load = sorted_index % loads;
        const int entry = column < 0 ? -65536 : (at + lane) * 65536 + in_buffer;
        if (lane < count) destination[at + load / 4 * 16 + sorted_index / loads * 4 + load % 4] = entry;
    }
#endif
}

// With packing: lists the columns of a stage that at least one group keeps.
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
    // The number of bits that are set.
    const int kept = rank(mask, 32 * info.mask_words() - 1) + (mask[info.mask_words() - 1] >> 31);
    for (int i = kept + lane; i < info.stage_columns; i += kWarp) columns[i] = -1;
    for (int column = lane; column < 32 * info.mask_words(); column += kWarp) {
        if (mask[column / 32] >> column % 32 & 1) columns[rank(mask, column)] = info.first_column(stage) + column;
    }
}

// A warp's task: with packing all groups of a stage, without packing one group.
__device__ __forceinline__ void write_column_info(const ColumnInfo& info, int task, Word* mask) {
    const int tile_groups = info.tile_groups();
    const int tasks_per_stage = info.columns ? 1 : tile_groups;
    const int index = task / tasks_per_stage;
    const int stage = index % info.stages;
    const int first_group = static_cast<int>(static_cast<long long>(index / info.stages) * info.tile_n / info.length);
    int* offsets = info.offsets + static_cast<long long>(index) * tile_groups * info.stage_slots;
    if (info.columns) list_columns(info, index, first_group, stage, mask);
    for (int group = task % tasks_per_stage; group < tile_groups; group += tasks_per_stage) {
        write_offsets(info, BufferIndex{info, mask}, first_group + group, stage, offsets + group * info.stage_slots);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) semisparse_vector_nm_column_info(
    // Shapes and meanings as in TransposeArgs (x_columns is its `columns`) and ColumnInfo.
    const Element* __restrict__ x, Element* __restrict__ x_t, int m, int k, int x_columns, int pitch,
    const unsigned char* __restrict__ positions, int* __restrict__ columns, int* __restrict__ offsets,
    int keep, int window, int groups, int slots, int length, int tile_n, int stage_slots, int stages, int stage_columns,
    int column_bytes, int transpose_tiles, int tasks
) {
    extern __shared__ uint4 shared[];
    if (blockIdx.x < transpose_tiles) {
        const TransposeArgs args{x, x_t, m, k, x_columns, pitch};
        if (k % (16 / BYTES) == 0) {
            transpose_chunks(args, blockIdx.x, reinterpret_cast<Word*>(shared));
        } else {
            transpose(args, blockIdx.x, reinterpret_cast<Element*>(shared));
        }
        return;
    }
    const ColumnInfo info{positions, columns, offsets, keep, window, groups, slots,
                          length, tile_n, stage_slots, stages, stage_columns, column_bytes};
    const int warp = threadIdx.x / kWarp;
    const int task = (blockIdx.x - transpose_tiles) * (kThreads / kWarp) + warp;
    if (task < tasks) write_column_info(info, task, reinterpret_cast<Word*>(shared) + warp * info.mask_words());
}
