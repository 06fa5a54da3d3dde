// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight with groups of 16 in 4 or 8 bits, and m of 1 to 8 * SETS.
//
// A chunk is 16 rows by 4 groups of 16 columns: what four m16n8k16 products take, the weights as their 16-row operand and
// up to 8 tokens in their columns. Lane l looks after group l % 4 of the rows l / 4 and l / 4 + 8. The four products take
// its 16 columns in their own order: the columns of a fragment are a permutation that weights and x share. So a lane
// needs no other lane's weights, and a chunk's bit l (l + 32 for the second row) says whether it has any.
//
// Stream-K: the chunks of all tiles of 16 rows, one after another, are cut into strips of BATCH chunks of a tile, the strips
// dealt out in equal runs to the blocks, and a block's run to its warps. A warp writes the tiles that lie in its run whole.
// Of the others it keeps its share; when a block's warps are done, the shares of a tile are added in the order of the
// warps, and where several blocks share it, by the last of them to come, in the order of the blocks: every run gives the
// same bits.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, scale, bias and y), BITS (4 or 8), SETS (of 8 tokens: 1 or 2), WARPS
// (of a block), BATCH (chunks that a warp loads at once), BLOCKS (of a processor, for registers) and WHOLE (1: k is a
// multiple of a strip's columns, 64 * BATCH).

#include "dequantise.cuh"

constexpr int kRows = 16;
constexpr int kColumns = 4 * kSize;        // of a chunk
constexpr int kTokens = 8 * SETS;
constexpr int kCells = kRows * kTokens;    // sums of a tile, token after token

struct Header {
    Word low, high;  // masks of rows 0 to 7 and 8 to 15
    Word start;      // groups stored before
};

struct Chunk {
    Word codes[2][kWords];  // of the lane's two rows; another group's where its own is dropped
    Word zero[2];           // likewise
    Word scale[2];          // likewise
    Word kept[2];           // 0 where the group is dropped, else what makes two of a scale
};

struct Weight {
    const uint2* masks;             // [chunks], low word first
    const Word* starts;              // [chunks + 1]
    const Word* codes;              // [kept, kWords]
    const unsigned short* scale;    // [kept], a SCALAR each
    const unsigned char* zero;      // [kept]
    Word last;                      // of the groups
};

// How the strips are dealt out.
struct Division {
    int tile_chunks, tile_strips;
    int each, more;  // a block's strips, and how many blocks have one more
    int begin, end;  // of this block
    int run;         // a warp's strips; the last warps may have fewer

    __device__ __forceinline__ Division(int tile_chunks, int each, int more)
        : tile_chunks(tile_chunks), tile_strips((tile_chunks + BATCH - 1) / BATCH), each(each), more(more),
          begin(begin_of(blockIdx.x)), end(begin_of(blockIdx.x + 1)), run((end - begin + WARPS - 1) / WARPS) {}

    __device__ __forceinline__ int begin_of(int block) const { return block * each + min(block, more); }

    __device__ __forceinline__ int block_of(int strip) const {
        const int larger = more * (each + 1);
        return strip < larger ? strip / (each + 1) : more + (strip - larger) / each;
    }
};

// Lane i gets the header of chunk i of a strip, which has `count` chunks.
__device__ __forceinline__ Header read_header(const Weight& weight, int chunk, int count) {
    const int lane = threadIdx.x % 32;
    if (lane >= min(count, BATCH)) return {0, 0, 0};
    const uint2 mask = __ldg(weight.masks + chunk + lane);
    return {mask.x, mask.y, __ldg(weight.starts + chunk + lane)};
}

// Where the group is dropped, another is read: no load waits for what another brought.
__device__ __forceinline__ void read_group(Chunk& chunk, const Weight& weight, int row, bool kept, Word place) {
    place = min(place, weight.last);
#if BITS == 4
    const uint2 codes = __ldg(reinterpret_cast<const uint2*>(weight.codes) + place);
#else
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(weight.codes) + place);
    chunk.codes[row][2] = codes.z;
    chunk.codes[row][3] = codes.w;
#endif
    chunk.codes[row][0] = codes.x;
    chunk.codes[row][1] = codes.y;
    chunk.zero[row] = __ldg(weight.zero + place);
    chunk.scale[row] = __ldg(weight.scale + place);
    chunk.kept[row] = kept ? 0x10001u : 0;
}

__device__ __forceinline__ void read_chunk(Chunk& chunk, const Weight& weight, const Header& header, int index, Word bit, Word below) {
    const Word low = __shfl_sync(kAll, header.low, index), high = __shfl_sync(kAll, header.high, index);
    const Word first = __shfl_sync(kAll, header.start, index), second = first + __popc(low);
    read_group(chunk, weight, 0, low & bit, first + __popc(low & below));
    read_group(chunk, weight, 1, high & bit, second + __popc(high & below));
}

// 16 columns of a token; what lies past k is zero.
__device__ __forceinline__ void read_x(Word (&words)[8], const SCALAR* place, int left) {
#if WHOLE
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 part = __ldg(reinterpret_cast<const uint4*>(place) + half);
        words[4 * half] = part.x;
        words[4 * half + 1] = part.y;
        words[4 * half + 2] = part.z;
        words[4 * half + 3] = part.w;
    }
#else
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(place);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        words[i] = 2 * i < left ? __ldg(bits + 2 * i) : 0;
        if (2 * i + 1 < left) words[i] |= static_cast<Word>(__ldg(bits + 2 * i + 1)) << 16;
    }
#endif
}

__device__ __forceinline__ void multiply_chunk(
    float (&sums)[SETS][4], const Chunk& chunk, const SCALAR* const (&x)[SETS], int column, int left, const Constants& constants
) {
    Word words[SETS][8];
#pragma unroll
    for (int set = 0; set < SETS; ++set) read_x(words[set], x[set] + column, left - column - threadIdx.x % 4 * kSize);
    Word upper[8], lower[8];
    dequantise(upper, chunk.codes[0], chunk.scale[0] * chunk.kept[0], chunk.zero[0], constants);
    dequantise(lower, chunk.codes[1], chunk.scale[1] * chunk.kept[1], chunk.zero[1], constants);
    const SCALAR* tag = nullptr;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const Word rows[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
#pragma unroll
        for (int set = 0; set < SETS; ++set) mma(sums[set], rows, words[set][i], words[set][i + 1], tag);
    }
}

struct Output {
    const SCALAR* __restrict__ bias;  // [n] or null
    SCALAR* __restrict__ y;           // [m, n]
    int m, n;

    __device__ __forceinline__ void write(int row, int token, float sum) const {
        if (row >= n || token >= m) return;
        store(y + static_cast<long long>(token) * n + row, sum + (bias ? to_float(bias[row]) : 0.0f));
    }
};

// What a warp's lane has of a tile: rows lane / 4 and 8 more of two tokens.
template <typename Take> __device__ __forceinline__ void each_sum(const float (&sums)[SETS][4], const Take& take) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * SETS; ++i) {
        take(lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8, sums[i / 4][i % 4]);
    }
}

// A warp's run: `shares` gets what it has of a tile that began before, then of one that goes on after it.
__device__ __forceinline__ void sum_run(
    float (&shares)[2][kCells], const Weight& weight, const Division& division, const SCALAR* x, const Output& output, int k
) {
    const int lane = threadIdx.x % 32;
    const int first = division.begin + threadIdx.x / 32 * division.run;
    int left = min(division.end - first, division.run);
    if (left <= 0) return;
    int tile = first / division.tile_strips, strip = first - tile * division.tile_strips;
    int chunk = tile * division.tile_chunks + strip * BATCH;
    bool begun_before = strip > 0;
    Word bit = 1u << lane, below = bit - 1;
    keep_in_register(bit);
    keep_in_register(below);
    const SCALAR* tokens[SETS];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        // Tokens past the last repeat it and are not kept.
        tokens[set] = x + static_cast<long long>(min(lane / 4 + 8 * set, output.m - 1)) * k + lane % 4 * kSize + strip * BATCH * kColumns;
    }
    const Constants constants;
    float sums[SETS][4] = {};
    Header header = read_header(weight, chunk, division.tile_chunks - strip * BATCH);
    for (; left > 0; --left) {
        Chunk chunks[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) read_chunk(chunks[i], weight, header, i, bit, below);
        const int column = strip * BATCH * kColumns;
        const bool ends = ++strip == division.tile_strips;
        chunk = ends ? (tile + 1) * division.tile_chunks : chunk + BATCH;
        if (left > 1) header = read_header(weight, chunk, division.tile_chunks - (ends ? 0 : strip * BATCH));
#pragma unroll
        for (int i = 0; i < BATCH; ++i) multiply_chunk(sums, chunks[i], tokens, i * kColumns, k - column, constants);
#pragma unroll
        for (int set = 0; set < SETS; ++set) tokens[set] += BATCH * kColumns;
        if (!ends && left > 1) continue;
        if (ends && !begun_before) {
            each_sum(sums, [&](int row, int token, float sum) { output.write(tile * kRows + row, token, sum); });
        } else {
            float* share = shares[!begun_before];
            each_sum(sums, [&](int row, int token, float sum) { share[token * kRows + row] = sum; });
        }
#pragma unroll
        for (int i = 0; i < 4 * SETS; ++i) sums[i / 4][i % 4] = 0.0f;
        begun_before = false;
#pragma unroll
        for (int set = 0; set < SETS; ++set) tokens[set] -= strip * BATCH * kColumns;
        strip = 0;
        ++tile;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) semisparse_gqs_decode(
    const SCALAR* __restrict__ x,             // [m, k]
    const uint2* __restrict__ masks,          // [chunks]
    const Word* __restrict__ starts,          // [chunks + 1]
    const Word* __restrict__ codes,           // [kept, kWords]
    const unsigned short* __restrict__ scale, // [kept]
    const unsigned char* __restrict__ zero,   // [kept]
    const SCALAR* __restrict__ bias,          // [n] or null
    SCALAR* __restrict__ y,                   // [m, n]
    float* __restrict__ parts,                // [blocks, 2, kCells]: a block's share of its first and of its last tile
    int* __restrict__ arrivals,               // [tiles], zero before and after
    int m, int n, int k, int tile_chunks,
    Word last,                                // kept - 1
    int each, int more                        // a block's strips, and how many blocks have one more
) {
    __shared__ float shares[WARPS][2][kCells];
    const Weight weight = {masks, starts, codes, scale, zero, last};
    const Division division(tile_chunks, each, more);
    const Output output = {bias, y, m, n};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sum_run(shares[warp], weight, division, x, output, k);
    __syncthreads();
    // A warp a tile.
    for (int tile = division.begin / division.tile_strips + warp; tile * division.tile_strips < division.end; tile += WARPS) {
        const int begin = tile * division.tile_strips, end = begin + division.tile_strips;
        const int from = max(begin, division.begin), to = min(end, division.end);
        const bool begins = from == begin, whole = begins && to == end;
        const int first = (from - division.begin) / division.run, last = (to - 1 - division.begin) / division.run;
        if (whole && first == last) continue;
        const auto share = [&](int cell) {
            float total = shares[first][begins][cell];
            for (int i = first + 1; i <= last; ++i) total += shares[i][0][cell];
            return total;
        };
        const int cells = kRows * m;
        if (!whole) {
            float* part = parts + (2ll * blockIdx.x + begins) * kCells;
            for (int cell = lane; cell < cells; cell += 32) part[cell] = share(cell);
            const int from_block = division.block_of(begin), to_block = division.block_of(end - 1);
            if (!is_last(arrivals + tile, to_block - from_block)) continue;
            for (int cell = lane; cell < cells; cell += 32) {
                float total = 0.0f;
                for (int block = from_block; block <= to_block; ++block) {
                    total += __ldcg(parts + (2ll * block + (block == from_block)) * kCells + cell);
                }
                output.write(tile * kRows + cell % kRows, cell / kRows, total);
            }
        } else {
            for (int cell = lane; cell < cells; cell += 32) {
                output.write(tile * kRows + cell % kRows, cell / kRows, share(cell));
            }
        }
    }
}
