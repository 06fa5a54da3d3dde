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

#include "pairs.cuh"
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

// Scales a warp group's sums and writes them: y lies by tokens, the sums by rows, so each 8 x 8 is transposed.
__device__ __forceinline__ void finish(const Sum (&sums)[TOKENS / 2], const float* token_scales, const float* row_scales,
                                       const OUT* bias, OUT* y, int first_row, int first_token, int m, int n) {
    const int lane = threadIdx.x % 32;
    const int warp_row = first_row + threadIdx.x % kGroup / 32 * 16;
    float scales[2], added[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = warp_row + lane / 4 + 8 * i;
        scales[i] = row < n && row_scales ? row_scales[row] : 1.0f;
        added[i] = row < n && bias ? static_cast<float>(bias[row]) : 0.0f;
    }
    const int out_row = warp_row + lane % 4 * 2;
    OUT* place = y + static_cast<Long>(first_token + lane / 4) * n + out_row;
    const int left = m - first_token - lane / 4;
    const int columns = n - out_row;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j, place += static_cast<Long>(8) * n) {
        const float2 by_token = *reinterpret_cast<const float2*>(token_scales + 8 * j + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = static_cast<float>(sums[4 * j + 2 * i]) * by_token.x * scales[i] + added[i];
            const float high = static_cast<float>(sums[4 * j + 2 * i + 1]) * by_token.y * scales[i] + added[i];
            const Word both = transposed(pair_of(low, high, static_cast<const OUT*>(nullptr)));
            if (8 * j >= left) continue;
#if PAIRS
            if (8 * i < columns) *reinterpret_cast<Word*>(place + 8 * i) = both;
#else
            if (8 * i < columns) place[8 * i] = reinterpret_cast<const OUT*>(&both)[0];
            if (8 * i + 1 < columns) place[8 * i + 1] = reinterpret_cast<const OUT*>(&both)[1];
#endif
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

// What the blocks of a grid share out: parts of tiles of y, of which this block computes GROUPS tiles of rows.
struct Work {
    int blocks, tiles;  // of w: along k, and of rows
    int parts;          // of k
    Word mine;          // this block's number in its cluster
    int token_tiles, row_tiles, count;

    __device__ __forceinline__ Work(int m, int blocks, int tiles, int parts)
        : blocks(blocks), tiles(tiles), parts(CLUSTER == 1 ? parts : 1), mine(block_of_cluster()),
          token_tiles((m + TOKENS - 1) / TOKENS), row_tiles((tiles + GROUPS * CLUSTER - 1) / (GROUPS * CLUSTER)),
          count(token_tiles * row_tiles * this->parts) {}

    __device__ __forceinline__ Tile tile(int index) const { return tile_of(index / parts, row_tiles, token_tiles); }

    // The first block of the index-th part, and the one behind its last.
    __device__ __forceinline__ int from(int index) const { return blocks * (index % parts) / parts; }
    __device__ __forceinline__ int to(int index) const { return blocks * (index % parts + 1) / parts; }

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
            barrier::wait(empty_at + 8 * at.stage, at.parity ^ 1);
            const Word told = full_at + 8 * at.stage;
            barrier::expect(told, kStage);
            copy_bulk(weights + at.stage * GROUPS * kTile, w_from, GROUPS * kTile, told);
            const Word place = stages + at.stage * kTokenTile + work.mine * kShare;
            if (CLUSTER == 1) {
                copy_bulk(place, x_from, kShare, told);
            } else {
                copy_to_all(place, x_from, kShare, told, (1 << CLUSTER) - 1);
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
    if (thread == 0) *last = count_arrival(arrivals) == parts - 1;
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
                              int blocks, int tiles, int parts) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ __align__(8) Long full[STAGES], empty[STAGES];
    __shared__ __align__(16) float token_scales_of[GROUPS][TOKENS];  // each warp group keeps its own
    __shared__ int last[GROUPS];
    const Word stages = shared_address(shared), full_at = shared_address(full), empty_at = shared_address(empty);
    const Work work(m, blocks, tiles, parts);
    const int group = threadIdx.x / kGroup;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier::init(full_at + 8 * i, 1);
            barrier::init(empty_at + 8 * i, GROUPS * 4 * CLUSTER);
        }
        barrier::publish();
    }
    sync_cluster();

    Walk at;
    if (group == GROUPS) {
        give_registers<kLeft>();
        if (threadIdx.x == GROUPS * kGroup) bring(work, w, x, stages, full_at, empty_at, at);
    } else {
        take_registers<kTaken>();
        const int thread = threadIdx.x % kGroup, lane = threadIdx.x % 32;
        Sum sums[TOKENS / 2];
        for (int index = blockIdx.x / CLUSTER; index < work.count; index += gridDim.x / CLUSTER) {
            const Tile tile = work.tile(index);
            const int row = work.first_row(tile) + group;
            for (int i = thread; i < TOKENS; i += kGroup) {
                const int token = tile.token * TOKENS + i;
                token_scales_of[group][i] = token_scales && token < m ? token_scales[token] : 1.0f;
            }
            const int from = work.from(index), to = work.to(index);
            for (int block = from; block < to; ++block) {
                barrier::wait(full_at + 8 * at.stage, at.parity);
                const int offset = STAGES * kTokenTile + (at.stage * GROUPS + group) * kTile;
                const Word* positions = reinterpret_cast<const Word*>(shared + offset + kValues) + thread;
                const Word first = positions[0], second = kSelectors == 1 ? positions[kGroup] : first;
                const Long w_at = describe(stages + offset, 1024, 128, 0);
                const Long x_at = describe(stages + at.stage * kTokenTile, 16, 1024, 1);
                __syncwarp();
                begin_products();
                multiply<0>(sums, w_at, x_at, first, block != from);
                multiply<kSelectors - 1>(sums, w_at + (2048 >> 4), x_at + (64 >> 4), second, 1);
                commit_products();
                // Not one more in flight: it would read its positions while the next are loaded into the same registers. The
                // other warp groups keep the tensor cores busy meanwhile.
                wait_for_products<0>();
                __syncwarp();  // every lane has read its positions
                if (CLUSTER == 1 && lane == 0) barrier::arrive(empty_at + 8 * at.stage);
                if (CLUSTER > 1 && lane < CLUSTER) arrive_at(empty_at + 8 * at.stage, lane);
                at.next();
            }
            if (CLUSTER == 1 && work.parts > 1) {
                const int number = index / work.parts * GROUPS + group;
                Sum* of_tile = kept + static_cast<Long>(number) * work.parts * (TOKENS / 2 * kGroup);
                if (!add_parts(sums, of_tile, arrivals + number, index % work.parts, work.parts, group, last + group))
                    continue;
            }
            sync_group(group);  // the scales are there
            finish(sums, token_scales_of[group], row_scales, bias, y, row * kRows, tile.token * TOKENS, m, n);
            sync_group(group);  // and read
        }
    }
    sync_cluster();  // nobody leaves while others may still write into its shared memory
}
