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
// once), BLOCKS (of a processor, for registers) and WHOLE (1: k is a multiple of a strip's columns, 64 * BATCH, and x is
// aligned to 16 bytes).

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

// Of a chunk: which groups it has, the rows 0 to 7 first, and how many are stored before.
struct Header {
    Word mask[2], start;
};

// Chunk `index` of a strip; past the tile's last one there is nothing.
__device__ __forceinline__ void read_header(Header& header, const Weight& weight, const Division& division, int strip, int index) {
#if WHOLE
    const int chunk = strip * BATCH + index;
    const bool found = true;
#else
    const int tile = strip / division.tile_strips, of_tile = strip % division.tile_strips * BATCH + index;
    const int chunk = tile * division.tile_chunks + of_tile;
    const bool found = of_tile < division.tile_chunks;
    header = {};
#endif
    load_words(header.mask, reinterpret_cast<const Word*>(weight.masks + chunk), found);
    load(header.start, weight.starts + chunk, found);
}

// Where the group is dropped, another is read: no load waits for what another brought.
__device__ __forceinline__ void read_group(Chunk& chunk, const Weight& weight, int row, Word place, bool wanted) {
    place = min(place, weight.last);
    load_words(chunk.codes[row], weight.codes + static_cast<size_t>(place) * kWords, wanted);
    load(chunk.zero[row], weight.zero + place, wanted);
    load(chunk.scale[row], weight.scale + place, wanted);
}

__device__ __forceinline__ void read_chunk(Chunk& chunk, const Weight& weight, const Header& header, Word below, bool wanted) {
    chunk.mask[0] = header.mask[0];
    chunk.mask[1] = header.mask[1];
    read_group(chunk, weight, 0, header.start + __popc(header.mask[0] & below), wanted);
    read_group(chunk, weight, 1, header.start + __popc(header.mask[0]) + __popc(header.mask[1] & below), wanted);
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

// A warp's run: `shares` gets what it has of a tile that began before, then of one that goes on after it. A strip's chunks are
// on their way while those of the strip before are multiplied, and their headers a strip earlier.
__device__ __forceinline__ void sum_run(
    float (&shares)[2][kCells], const Weight& weight, const Division& division, const Product::X* x, const Output& output, int k
) {
    int strip = division.begin + threadIdx.x / 32 * division.run;
    const int end = min(strip + division.run, division.end);
    const Word bit = 1u << threadIdx.x % 32, below = bit - 1;
    Header headers[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (strip < end) read_header(headers[i], weight, division, strip, i);
    }
    Product product(x, output.m, k);
    if (strip >= end) return;
    int tile = strip / division.tile_strips, of_tile = strip - tile * division.tile_strips;
    bool begun_before = of_tile > 0;
    product.move(of_tile * BATCH * kColumns);
    Chunk chunks[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        read_chunk(chunks[i], weight, headers[i], below, true);
        read_header(headers[i], weight, division, min(strip + 1, end - 1), i);
    }
    __syncwarp();  // nothing is computed before all of the strip is on its way
    for (; strip < end; ++strip) {
        const int columns = k - of_tile * BATCH * kColumns, later = min(strip + 2, end - 1);
        const bool more = strip + 1 < end;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            product.add(chunks[i], i * kColumns, columns - i * kColumns, bit);
            read_chunk(chunks[i], weight, headers[i], below, more);
            read_header(headers[i], weight, division, later, i);
            __syncwarp();
        }
        product.move(BATCH * kColumns);
        const bool ends = ++of_tile == division.tile_strips;
        if (!ends && more) continue;
        if (ends && !begun_before) {
            product.each([&](int row, int token, float sum) { output.write(tile * kRows + row, token, sum); });
        } else {
            float* share = shares[!begun_before];
            product.each([&](int row, int token, float sum) { share[token * kRows + row] = sum; });
        }
        product.clear();
        product.move(-of_tile * BATCH * kColumns);
        begun_before = false;
        of_tile = 0;
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
