// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight with groups of 16 in 4 or 8 bits, and m of 1 to TOKENS.
//
// Stream-K: the chunks of all tiles of 16 rows, one after another, are cut into strips of BATCH chunks of a tile, the strips
// dealt out in equal runs to the blocks, and a block's run to its warps. A warp writes the tiles that lie in its run whole.
// Of the others it keeps its share; when a block's warps are done, the shares of a tile are added in the order of the
// warps, and where several blocks share it, by the last of them to come, in the order of the blocks: every run gives the
// same bits.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of scale, bias and y, and of x where it is not rounded), BITS (4 or 8), TOKENS
// (1 or 2 by codes, 8 or 16 by weights), ROUNDED (1: x is in 8 bits), WARPS (of a block), BATCH (chunks that a warp loads at
// once), BLOCKS (of a processor, for registers) and WHOLE (1: k is a multiple of a strip's columns, 64 * BATCH, and x, masks and
// starts are aligned to 16 bytes).

#if TOKENS >= 8
#include "by_weights.cuh"
#elif ROUNDED
#include "by_bytes.cuh"
#else
#include "by_codes.cuh"
#endif

constexpr int kCells = kRows * (TOKENS < 8 ? 8 : TOKENS);  // sums of a tile, token after token

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

// Of the chunks of a strip: their masks, and how many groups are stored before each.
struct Headers {
    Word masks[BATCH][2], starts[BATCH];
};

// Those past the tile's last chunk, of which `count` are left, have nothing.
__device__ __forceinline__ void read_headers(Headers& headers, const Weight& weight, int chunk, int count) {
#if WHOLE
    read_words<2 * BATCH>(headers.masks[0], weight.masks + chunk);
    read_words<BATCH>(headers.starts, weight.starts + chunk);
#else
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const uint2 mask = i < count ? __ldg(weight.masks + chunk + i) : uint2{0, 0};
        headers.masks[i][0] = mask.x;
        headers.masks[i][1] = mask.y;
        headers.starts[i] = i < count ? __ldg(weight.starts + chunk + i) : 0;
    }
#endif
}

// Where the group is dropped, another is read: no load waits for what another brought.
__device__ __forceinline__ void read_group(Chunk& chunk, const Weight& weight, int row, Word place) {
    place = min(place, weight.last);
    load_words<kWords>(chunk.codes[row], weight.codes + static_cast<size_t>(place) * kWords);
    chunk.zero[row] = load(weight.zero + place);
    chunk.scale[row] = load(weight.scale + place);
}

__device__ __forceinline__ void read_chunk(Chunk& chunk, const Weight& weight, const Headers& headers, int index, Word below) {
    const Word low = headers.masks[index][0], high = headers.masks[index][1], start = headers.starts[index];
    chunk.mask[0] = low;
    chunk.mask[1] = high;
    read_group(chunk, weight, 0, start + __popc(low & below));
    read_group(chunk, weight, 1, start + __popc(low) + __popc(high & below));
}

struct Output {
    const SCALAR* __restrict__ bias;  // [n] or null
    SCALAR* __restrict__ y;           // [m, n]
    const float* __restrict__ x_scale;  // [m] where x is rounded
    int m, n;

    __device__ __forceinline__ void write(int row, int token, float sum) const {
        if (row >= n || token >= m) return;
        const float product = Product::final(sum, x_scale, token);
        store(y + static_cast<long long>(token) * n + row, product + (bias ? to_float(bias[row]) : 0.0f));
    }
};

// A warp's run: `shares` gets what it has of a tile that began before, then of one that goes on after it.
__device__ __forceinline__ void sum_run(
    float (&shares)[2][kCells], const Weight& weight, const Division& division, const Product::X* x, const Output& output, int k
) {
    const int first = division.begin + threadIdx.x / 32 * division.run;
    int left = min(division.end - first, division.run);
    int tile = first / division.tile_strips, strip = first - tile * division.tile_strips;
    int chunk = tile * division.tile_chunks + strip * BATCH;
    bool begun_before = strip > 0;
    const Word bit = 1u << threadIdx.x % 32, below = bit - 1;
    Headers headers;
    if (left > 0) read_headers(headers, weight, chunk, division.tile_chunks - strip * BATCH);
    Product product(x, output.m, k);
    product.move(strip * BATCH * kColumns);
    for (; left > 0; --left) {
        Chunk chunks[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) read_chunk(chunks[i], weight, headers, i, below);
        __syncwarp();  // nothing is computed before all of the strip is on its way
        const int columns = k - strip * BATCH * kColumns;
        const bool ends = ++strip == division.tile_strips;
        chunk = ends ? (tile + 1) * division.tile_chunks : chunk + BATCH;
        if (left > 1) read_headers(headers, weight, chunk, division.tile_chunks - (ends ? 0 : strip * BATCH));
#pragma unroll
        for (int i = 0; i < BATCH; ++i) product.add(chunks[i], i * kColumns, columns - i * kColumns, bit);
        product.move(BATCH * kColumns);
        if (!ends && left > 1) continue;
        if (ends && !begun_before) {
            product.each([&](int row, int token, float sum) { output.write(tile * kRows + row, token, sum); });
        } else {
            float* share = shares[!begun_before];
            product.each([&](int row, int token, float sum) { share[token * kRows + row] = sum; });
        }
        product.clear();
        product.move(-strip * BATCH * kColumns);
        begun_before = false;
        strip = 0;
        ++tile;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) semisparse_gqs_decode(
    const Product::X* __restrict__ x,         // [m, k]
    const float* __restrict__ x_scale,        // [m] where x is rounded
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
    const Output output = {bias, y, x_scale, m, n};
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
