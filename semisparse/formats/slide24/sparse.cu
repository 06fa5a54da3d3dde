// y[m, n] = (sum_k x[m, k] * w[n, k]) * token_scales[m] * row_scales[n] + bias[n] for a 2:4 weight w in the layout `tiles` and
// lifted activations x in tiles, too: one launch, on Hopper's sparse tensor cores.
//
// A block computes ROWS = 64 * GROUPS rows of w for TOKENS tokens; a cluster of CLUSTER blocks takes as many times ROWS
// rows and the same tokens. One warp brings what is to be multiplied, 128 bytes of every token at a time: the block's own
// tile of w, and its share of the tokens, which goes to every block of the cluster. GROUPS warp groups multiply. Blocks
// stay and walk over the tiles of y, so that the next tile is on its way while one is being scaled and written.
//
// Where y has fewer tiles than there are processors, K is cut into parts (of blocks that are no cluster), each a block's: all
// write their sums, and the last to come adds them in the order of the parts, so that every run gives the same bits.
//
// What bounds it is shared memory: 64 rows times TOKENS tokens read 64 * TOKENS + 2,048 bytes in TOKENS / 2 cycles, 144 of
// the 128 bytes a cycle there are, and bringing the tiles comes on top. So tiles are as large as registers allow.
//
// Compiled for INT8, FP8, BF16 or FP16 (of w and x), OUT (of y), PAIRS (whether n is even), TOKENS, GROUPS, CLUSTER, STAGES.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/ldmatrix.cuh"
#include "types.cuh"
#include "sparse.cuh"

constexpr int kRows = 64;                  // of a warp group
constexpr int kGroup = 128;                // threads of a warp group
constexpr int kValues = kRows * 64;        // bytes of a tile's values
#if defined(INT8) || defined(FP8)
constexpr int kSelectors = 1;              // steps that a word of positions serves
#else
constexpr int kSelectors = 2;
#endif
constexpr int kTile = kValues + 1024 / kSelectors;  // with the positions
constexpr int kTokenBytes = 128;                    // of a token in a stage
constexpr int kTokenTile = TOKENS * kTokenBytes;
constexpr int kShare = kTokenTile / CLUSTER;
constexpr int kStage = kTokenTile + GROUPS * kTile;
constexpr int kTogether = 4096 / TOKENS;  // tiles of tokens in a band at most, so that a band of x stays in L2

constexpr int kTurn = 16;                 // tokens that a warp group writes at a time

#if GROUPS == 3
constexpr int kTaken = 160, kLeft = 32;
#else
constexpr int kTaken = 232, kLeft = 40;
#endif

struct Tile {
    int row, token;  // in tiles
};

// Which tile of y comes as the index-th: tokens first, then rows, a band of tokens after the other.
__device__ __forceinline__ Tile tile_of(int index, int row_tiles, int token_tiles) {
    const int bands = (token_tiles + kTogether - 1) / kTogether, most = (token_tiles + bands - 1) / bands;
    const int band = index / (most * row_tiles), within = index % (most * row_tiles);
    const int width = min(most, token_tiles - band * most);
    return {within / width, band * most + within % width};
}

// What a tile's sums are multiplied with and added to. A thread asks for its part before the products, so that it is there after.
struct Scales {
    float tokens[(TOKENS + kGroup - 1) / kGroup], rows[2], added[2];

    __device__ __forceinline__ Scales(const float* of_tokens, const float* of_rows, const OUT* bias, int first_row,
                                      int first_token, int m, int n) {
        const int thread = threadIdx.x % kGroup;
#pragma unroll
        for (int i = 0; i * kGroup < TOKENS; ++i) {
            const int token = first_token + thread + i * kGroup;
            tokens[i] = of_tokens && token < m ? of_tokens[token] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
            rows[i] = of_rows && row < n ? of_rows[row] : 1.0f;
            added[i] = bias && row < n ? static_cast<float>(bias[row]) : 0.0f;
        }
    }
};

// What a warp group keeps in shared memory to write its tile of y: its scales, and twice kTurn tokens of y as they lie in memory.
struct alignas(128) Desk {
    unsigned char turns[2][kTurn * kRows * sizeof(OUT)];
    float token_scales[TOKENS];
};

// Scales a warp group's sums and writes them. Sums lie by rows and y by tokens: they are transposed on the way through shared
// memory, and lines of 128 bytes are written.
__device__ __forceinline__ void finish(const Sum (&sums)[TOKENS / 2], const Scales& scales, Desk& desk, int group, OUT* y,
                                       int first_row, int first_token, int m, int n) {
    const int thread = threadIdx.x % kGroup, lane = threadIdx.x % 32, warp = thread / 32;
#pragma unroll
    for (int i = 0; i * kGroup < TOKENS; ++i)
        if (thread + i * kGroup < TOKENS) desk.token_scales[thread + i * kGroup] = scales.tokens[i];
    sync_group(group);
    // Of a turn's token t, the eight rows c stand at place c ^ (t % 8).
    const int put_token = lane / 16 * 8 + lane % 8, put = put_token * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    const int token = thread / 8, row = first_row + thread % 8 * 8, get = token * 128 + (thread % 8 ^ token % 8) * 16;
    OUT* place = y + static_cast<Long>(first_token + token) * n + row;
#pragma unroll
    for (int turn = 0; turn < TOKENS / kTurn; ++turn, place += static_cast<Long>(kTurn) * n) {
        Word words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = 2 * turn + half;
            const float2 by_token = *reinterpret_cast<const float2*>(desk.token_scales + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                words[2 * half + i] =
                    pack2(static_cast<float>(sums[4 * j + 2 * i]) * by_token.x * scales.rows[i] + scales.added[i],
                            static_cast<float>(sums[4 * j + 2 * i + 1]) * by_token.y * scales.rows[i] + scales.added[i],
                            static_cast<const OUT*>(nullptr));
        }
        unsigned char* of_turn = desk.turns[turn % 2];
        stmatrix_x4_trans(smem_address(of_turn + put), words);
        sync_group(group);
        const uint4 found = *reinterpret_cast<const uint4*>(of_turn + get);
        const bool inside = first_token + turn * kTurn + token < m;
        if (n % 8 == 0) {
            if (inside && row < n) *reinterpret_cast<uint4*>(place) = found;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (inside && row + i < n) place[i] = reinterpret_cast<const OUT*>(&found)[i];
        }
    }
}

struct Walk {  // over the stages, for as long as the block lives
    int stage = 0;
    Word parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// What the blocks of a grid share out: tiles of y, of which this block computes GROUPS tiles of rows. The last ones are cut
// into parts of K.
struct Work {
    int blocks, tiles;  // of w: along k, and of rows
    int parts;          // of k
    Word mine;          // this block's number in its cluster
    int token_tiles, row_tiles, whole, count;

    __device__ __forceinline__ Work(int m, int blocks, int tiles, int whole, int parts)
        : blocks(blocks), tiles(tiles), parts(parts), mine(cluster_ctarank()), token_tiles((m + TOKENS - 1) / TOKENS),
          row_tiles((tiles + GROUPS * CLUSTER - 1) / (GROUPS * CLUSTER)), whole(whole),
          count(whole + (token_tiles * row_tiles - whole) * parts) {}

    __device__ __forceinline__ bool is_part(int index) const { return index >= whole; }
    __device__ __forceinline__ int cut(int index) const { return (index - whole) / parts; }  // which of the tiles in parts
    __device__ __forceinline__ int part(int index) const { return (index - whole) % parts; }

    __device__ __forceinline__ Tile tile(int index) const {
        return tile_of(is_part(index) ? whole + cut(index) : index, row_tiles, token_tiles);
    }

    // The first block of the index-th piece of work, and the one behind its last.
    __device__ __forceinline__ int from(int index) const { return is_part(index) ? blocks * part(index) / parts : 0; }
    __device__ __forceinline__ int to(int index) const {
        return is_part(index) ? blocks * (part(index) + 1) / parts : blocks;
    }

    // The first of its tiles of rows: at the end they are taken from before, and computed twice.
    __device__ __forceinline__ int first_row(const Tile& tile) const {
        return min((tile.row * CLUSTER + static_cast<int>(mine)) * GROUPS, tiles - GROUPS);
    }
};

// One thread brings every stage of the block's tiles, as places become empty.
__device__ __forceinline__ void bring(const Work& work, const unsigned char* w, const unsigned char* x, Word stages,
                                      Word full_at, Word empty_at, Walk& at) {
    const Word weights = stages + STAGES * kTokenTile;
    const Long w_stride = static_cast<Long>(work.tiles) * kTile;
    const Long x_stride = static_cast<Long>(work.token_tiles) * kTokenTile;
    for (int index = blockIdx.x / CLUSTER; index < work.count; index += gridDim.x / CLUSTER) {
        const Tile tile = work.tile(index);
        const int from = work.from(index), to = work.to(index);
        const unsigned char* w_from = w + from * w_stride + static_cast<Long>(work.first_row(tile)) * kTile;
        const unsigned char* x_from = x + from * x_stride + static_cast<Long>(tile.token) * kTokenTile + work.mine * kShare;
        for (int block = from; block < to; ++block) {
            mbarrier_wait_parity(empty_at + 8 * at.stage, at.parity ^ 1);
            const Word told = full_at + 8 * at.stage;
            mbarrier_arrive_expect_tx(told, kStage);
            cp_async_bulk(weights + at.stage * GROUPS * kTile, w_from, GROUPS * kTile, told);
            const Word place = stages + at.stage * kTokenTile + work.mine * kShare;
            if (CLUSTER == 1) {
                cp_async_bulk(place, x_from, kShare, told);
            } else {
                cp_async_bulk_multicast(place, x_from, kShare, told, (1 << CLUSTER) - 1);
            }
            w_from += w_stride;
            x_from += x_stride;
            at.next();
        }
    }
}

// Keeps a warp group's sums of one part for the group that comes last to this tile. Says whether this one is that, and then
// gives it the sums of all parts. `kept` has room for those of every part, `arrivals` is 0 before the first.
__device__ __forceinline__ bool add_parts(Sum (&sums)[TOKENS / 2], Sum* kept, int* arrivals, int part, int parts,
                                          int group, int* last) {
    constexpr int kSums = TOKENS / 2 * kGroup;
    const int thread = threadIdx.x % kGroup;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) kept[part * kSums + i * kGroup + thread] = sums[i];
    sync_group(group);
    if (thread == 0) *last = atom_acq_rel_gpu_increment(arrivals) == parts - 1;
    sync_group(group);
    if (!*last) return false;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = __ldcg(kept + i * kGroup + thread);
    for (int other = 1; other < parts; ++other)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] += __ldcg(kept + other * kSums + i * kGroup + thread);
    return true;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((GROUPS + 1) * kGroup, 1)
    semisparse_slide24_sparse(const unsigned char* w, const unsigned char* x, const float* token_scales,
                              const float* row_scales, const OUT* bias, OUT* y, Sum* kept, int* arrivals, int m, int n,
                              int blocks, int tiles, int whole, int parts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) Long full[STAGES], empty[STAGES];
    __shared__ int last[GROUPS];
    const Word stages = smem_address(shared), full_at = smem_address(full), empty_at = smem_address(empty);
    const Work work(m, blocks, tiles, whole, parts);
    const int group = threadIdx.x / kGroup;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full_at + 8 * i, 1);
            mbarrier_init(empty_at + 8 * i, GROUPS * 4 * CLUSTER);
        }
        fence_mbarrier_init();
    }
    barrier_cluster_sync();

    Walk at;
    if (group == GROUPS) {
        setmaxnreg_dec<kLeft>();
        if (threadIdx.x == GROUPS * kGroup) bring(work, w, x, stages, full_at, empty_at, at);
    } else {
        setmaxnreg_inc<kTaken>();
        const int thread = threadIdx.x % kGroup, lane = threadIdx.x % 32;
        Desk& desk = reinterpret_cast<Desk*>(shared + STAGES * kStage)[group];
        if (group > 0) wait_for_group(group);
        Sum sums[TOKENS / 2];
        for (int index = blockIdx.x / CLUSTER; index < work.count; index += gridDim.x / CLUSTER) {
            const Tile tile = work.tile(index);
            const int first_row = (work.first_row(tile) + group) * kRows, first_token = tile.token * TOKENS;
            const Scales scales(token_scales, row_scales, bias, first_row, first_token, m, n);
            const int from = work.from(index), to = work.to(index);
            for (int block = from; block < to; ++block) {
                mbarrier_wait_parity(full_at + 8 * at.stage, at.parity);
                const int offset = STAGES * kTokenTile + (at.stage * GROUPS + group) * kTile;
                const Word* positions = reinterpret_cast<const Word*>(shared + offset + kValues) + thread;
                const Word first = positions[0], second = kSelectors == 1 ? positions[kGroup] : first;
                const Long w_at = smem_descriptor(stages + offset, 1024, 128, kNoSwizzle);
                const Long x_at = smem_descriptor(stages + at.stage * kTokenTile, 16, 1024, kSwizzle128);
                __syncwarp();
                wgmma_fence();
                wgmma_sp_m64<0>(sums, w_at, x_at, first, block != from, static_cast<const Element*>(nullptr));
                wgmma_sp_m64<kSelectors - 1>(sums, w_at + (2048 >> 4), x_at + (64 >> 4), second, 1, static_cast<const Element*>(nullptr));
                wgmma_commit_group();
                // Not one more in flight: it would read its positions while the next are loaded into the same registers. The
                // other warp groups keep the tensor cores busy meanwhile.
                wgmma_wait_group<0>();
                __syncwarp();  // every lane has read its positions
                if (CLUSTER == 1 && lane == 0) mbarrier_arrive(empty_at + 8 * at.stage);
                if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_cluster(empty_at + 8 * at.stage, lane);
                at.next();
                if (group + 1 < GROUPS && index == blockIdx.x / CLUSTER && block == min(from + SKEW, to) - 1)
                    let_group(group + 1);
            }
            if (work.parts > 1 && work.is_part(index)) {
                const int number = (work.cut(index) * CLUSTER + static_cast<int>(work.mine)) * GROUPS + group;
                Sum* of_tile = kept + static_cast<Long>(number) * work.parts * (TOKENS / 2 * kGroup);
                if (!add_parts(sums, of_tile, arrivals + number, work.part(index), work.parts, group, last + group))
                    continue;
            }
            finish(sums, scales, desk, group, y, first_row, first_token, m, n);
        }
    }
    barrier_cluster_sync();  // nobody leaves while others may still write into its shared memory
}
