// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and m of 1 to TOKENS.
//
// A warp turns a tile into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand; tokens are the 8 columns of
// the other, so one token and eight cost the same pass. Each mma step takes 4 columns of every lane's block, so the
// fragment's 16 columns are a permutation of K, which x follows.
//
// A team of SPLITS warps computes a tile of rows, the column tiles dealt out among them; TEAMS teams make a block and walk
// over the rows side by side. STAGES tiles of each warp are in shared memory, on their way or being read, and with each the
// columns of x that go with it, which the warps of the same split bring and read together; where the columns stay the same,
// x stays. Sums are float32 and reduced in a fixed order: every run gives the same bits.
//
// Compiled for SCALAR (half or bfloat16, of x, w and bias), OUT (of y), KEEP (values a block), TOKENS (1, 8, 16, 32 or 64),
// SPLITS, TEAMS, STAGES.

#include "ptx/bar.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "types.cuh"
#include "tiled.cuh"

constexpr int kTeam = SPLITS * kWarp;
constexpr int kUnit = 8;                   // values of x in 16 bytes: two steps of a lane
constexpr int kTokenBytes = kColumns * 2;  // of x in a place
constexpr int kTokenGroups = (TOKENS + 7) / 8;
constexpr int kSums = TOKENS > 16 ? 1 : 2;  // with few tokens even and odd steps add apart: an mma need not wait for the last
constexpr int kWarps = TEAMS * SPLITS;

static_assert(TEAMS == 1 || SPLITS <= 15, "a block has 16 barriers");

// Where in a token's columns a unit of a lane's block stands, as a change of the address: so the eight lanes that are served
// at a time, four blocks of two tokens, meet in no bank.
__device__ __forceinline__ int shuffled(int block, int token) { return (block + token % 2 * 4) * 16; }

// The columns of x that go with a column tile, on their way to shared memory.
struct Source {
    const SCALAR* x;  // [m, k]
    int m, k;
    bool vectors;     // whether every row of x is 16-byte aligned

    // Asks for the columns of a tile: every TEAMS-th token from `first` on, a unit a lane; from k on they are zero.
    __device__ __forceinline__ void copy(Word to, int column_tile, int first, int lane) const {
        const int column = column_tile * kColumns + lane * kUnit;
        const int left = min(max(k - column, 0), kUnit);
        const SCALAR* from = x + (left ? column : 0) + static_cast<long long>(first) * k;
        if (vectors) {
#pragma unroll
            for (int i = 0; i < TOKENS; i += TEAMS, from += TEAMS * static_cast<long long>(k))
                if (first + i < m) cp_async_16(place(to, first + i, lane), from, left * 2);
            return;
        }
#pragma unroll 1
        for (int token = first; token < m; token += TEAMS, from += TEAMS * static_cast<long long>(k))
            copy_values(place(to, token, lane), reinterpret_cast<const unsigned short*>(from), left);
    }

    static __device__ __forceinline__ Word place(Word to, int token, int lane) {
        return to + token * kTokenBytes + (lane * 16 ^ shuffled(lane / 8, token));
    }

    static __device__ __forceinline__ void copy_values(Word to, const unsigned short* from, int left) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const unsigned short value = i < left ? *const_cast<const volatile unsigned short*>(from + i) : 0;
            st_shared_u16(to + 2 * i, value);
        }
    }
};

// A lane's tokens g, g + 8 ... in a place: addresses of unit 0 of its block. Tokens past the last repeat it and are not kept.
struct Activations {
    Word blocks[kTokenGroups];

    __device__ __forceinline__ Activations(Word place, int m, int lane) {
#pragma unroll
        for (int i = 0; i < kTokenGroups; ++i) {
            const int token = min(lane / 4 + 8 * i, m - 1);
            blocks[i] = place + token * kTokenBytes + lane % 4 * kBlock * 2 + shuffled(lane % 4, token);
        }
    }
};

using Sums = float[kSums][kTokenGroups][4];

template <int step = 0>
__device__ __forceinline__ void multiply(Sums& sums, Rows& rows, const Activations& x, uint4 (&held)[kTokenGroups]) {
    const uint2 a = rows.upper.take<step>();
    const uint2 b = rows.lower.take<step>();
    const Word weights[4] = {a.x, b.x, a.y, b.y};
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
        if (step % 2 == 0) held[i] = ld_shared_v4(x.blocks[i] ^ step * 8);
        mma_m16n8k16(sums[step % kSums][i], weights, step % 2 ? held[i].z : held[i].x, step % 2 ? held[i].w : held[i].y,
            static_cast<const SCALAR*>(nullptr));
    }
    if constexpr (step + 1 < kSteps) multiply<step + 1>(sums, rows, x, held);
}

using Partial = float[TOKENS][kRows];  // a warp's sums

// Lane 4 * g + t holds the rows g and g + 8 of the tokens 2 t and 2 t + 1.
__device__ __forceinline__ void keep(Partial& partial, const Sums& sums, int m, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenGroups; ++i) {
        const int token = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const float sum = sums[0][i / 4][i % 4] + (kSums > 1 ? sums[kSums - 1][i / 4][i % 4] : 0.0f);
        if (token < m) partial[token][lane / 4 + i / 2 % 2 * 8] = sum;
    }
}

// Adds what a team's warps kept; each of them stores a share. `index` is the thread's in its team.
__device__ __forceinline__ void finish(const Partial* partials, const SCALAR* bias, OUT* y, int m, int n, int first_row,
                                       int index) {
#pragma unroll 1
    for (int i = index; i < m * kRows; i += kTeam) {
        const int row = first_row + i % kRows;
        if (row >= n) continue;
        float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) sum += partials[split][i / kRows][i % kRows];
        store(y + static_cast<long long>(i / kRows) * n + row, sum);
    }
}

// The warps that share columns of x meet.
__device__ __forceinline__ void wait_for_split(int split) {
    if (TEAMS == 1) __syncwarp();
    else bar_sync<TEAMS * kWarp>(1 + split);
}

// What one warp reads: its tiles in order, its columns of one group of TEAMS tiles of rows, then of the block's next group;
// and its share of x.
struct Stream {
    const unsigned char* tiles;
    Source source;
    Word my_tiles, my_x;         // shared addresses of its places
    int x_bytes, row_tiles, column_tiles, stride, team, split, lane;
    int group, column;           // of the tile to be asked for next

    __device__ __forceinline__ void advance() {
        column += SPLITS;
        if (column >= column_tiles) column = split, group += stride;
    }

    __device__ __forceinline__ void copy_weights(int stage) const {
        const long long index = static_cast<long long>(group + team) * column_tiles + column;
        if (group + team < row_tiles) copy_tile(my_tiles + stage * kTileBytes, tiles + index * kTileBytes, lane);
    }

    // Fills a place whose x belongs to the column tile `held`.
    __device__ __forceinline__ void refill(int stage, int held) {
        if (group < row_tiles && column != held) source.copy(my_x + stage * x_bytes, column, team, lane);
        copy_weights(stage);
        cp_async_commit_group();
        advance();
    }

    // Fills every place.
    __device__ __forceinline__ void start(bool dependent) {
        const int first = group;
        if (dependent) {  // the weights are nobody's output
#pragma unroll
            for (int i = 0; i < STAGES; ++i, advance()) copy_weights(i);
            griddepcontrol_wait();
            group = first, column = split;
        }
#pragma unroll
        for (int i = 0; i < STAGES; ++i, advance()) {
            // x goes first, lest it queue behind the weights: 8.8 for 8.1 us at 4096 x 4096.
            if (group < row_tiles) source.copy(my_x + i * x_bytes, column, team, lane);
            if (!dependent) copy_weights(i);
            cp_async_commit_group();
        }
    }
};

extern "C" __global__ void __launch_bounds__(TEAMS * kTeam, 1) semisparse_bitmask_tiled_decode(
    const SCALAR* __restrict__ x,             // [m, k]
    const unsigned char* __restrict__ tiles,  // [row_tiles, column_tiles, kTileBytes]
    const SCALAR* __restrict__ bias,          // [n] or null
    OUT* __restrict__ y,                      // [m, n]
    int m, int n, int k, int row_tiles, int column_tiles,
    int vectors,                              // whether every row of x is 16-byte aligned
    int dependent                             // whether this launch may begin before the previous kernel ends
) {
    // Tiles by warp and stage, x by split and stage, then the sums of two groups.
    extern __shared__ __align__(256) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int team = warp / SPLITS;
    const int split = warp % SPLITS;
    const int stride = gridDim.x * TEAMS;
    const int first_group = blockIdx.x * TEAMS;
    const int x_bytes = m * kTokenBytes;
    const Word all_x = smem_address(shared) + kWarps * STAGES * kTileBytes;
    Partial* partials = reinterpret_cast<Partial*>(shared + kWarps * STAGES * kTileBytes + SPLITS * STAGES * x_bytes);
    Stream stream{tiles, Source{x, m, k, vectors != 0}, smem_address(shared) + warp * STAGES * kTileBytes,
                  all_x + split * STAGES * x_bytes, x_bytes, row_tiles, column_tiles, stride, team, split, lane,
                  first_group, split};
    griddepcontrol_launch_dependents();
    stream.start(dependent);

    int stage = 0, parity = 0;
    for (int group = first_group; group < row_tiles; group += stride, parity ^= 1) {
        Sums sums = {};
#pragma unroll 1
        for (int column = split; column < column_tiles; column += SPLITS) {
            wait_for_tiles<STAGES - 1>();
            wait_for_split(split);
            if (group + team < row_tiles) {
                Rows rows(stream.my_tiles + stage * kTileBytes, lane);
                const Activations activations(stream.my_x + stage * x_bytes, m, lane);
                uint4 held[kTokenGroups];
                multiply(sums, rows, activations, held);
            }
            wait_for_split(split);
            stream.refill(stage, column);
            stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        Partial* kept = partials + parity * kWarps;
        keep(kept[warp], sums, m, lane);
        __syncthreads();
        finish(kept + warp - split, bias, y, m, n, (group + team) * kRows, split * kWarp + lane);
    }
}
