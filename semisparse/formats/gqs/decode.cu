// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight with groups of 16 in 4 or 8 bits, and m of 1 to TOKENS.
//
// Stream-K: the chunks of all tiles of 16 rows, one after another, are cut into strips of BATCH chunks of a tile, the strips
// dealt out in equal runs to the blocks, and a block's run to its warps. A warp writes the tiles that lie in its run whole.
// Of the others it keeps its share; when a block's warps are done, the shares of a tile are added in the order of the
// warps, and where several blocks share it, by the last of them, in the order of the blocks: every run gives the same bits.
//
// A launch may begin before the kernel before it has ended: up to `wait_for_previous_kernel` only the weight is read.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, scale, bias and y), BITS (4 or 8), TOKENS (1 or 2 by codes, 8 or 16 by
// weights), ROUNDED (1: x is rounded to 8 bits), WARPS (of a block), BATCH (chunks that a warp multiplies at once), BLOCKS (of a
// processor, for registers), PIECE and SLOTS (see stream.cuh) and WHOLE (1: k is a multiple of a strip's columns, 64 * BATCH, and
// x is aligned to 16 bytes).

#if TOKENS >= 8
#include "by_weights.cuh"
#elif ROUNDED
#include "by_bytes.cuh"
#else
#include "by_codes.cuh"
#endif
#include "stream.cuh"

#if STAMPS
#define STAMP(i) if (threadIdx.x == 0) parts[blockIdx.x * 8 + i] = i == 7 ? now() : clock64();
__device__ __forceinline__ unsigned long long now() { unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
#else
#define STAMP(i)
#endif

constexpr int kCells = kRows * TOKENS;  // sums of a tile, token after token

// How the strips are dealt out.
struct Division {
    int tile_chunks, tile_strips;
    int each, more;  // a block's strips, and how many blocks have one more
    int begin, end;  // of this block

    __device__ __forceinline__ Division(int tile_chunks, int each, int more)
        : tile_chunks(tile_chunks), tile_strips((tile_chunks + BATCH - 1) / BATCH), each(each), more(more),
          begin(begin_of(blockIdx.x)), end(begin_of(blockIdx.x + 1)) {}

    __device__ __forceinline__ int begin_of(int block) const { return block * each + min(block, more); }

    __device__ __forceinline__ int chunk_of(int strip) const {
        if (WHOLE) return strip * BATCH;
        const int tile = strip / tile_strips;
        return tile * tile_chunks + (strip - tile * tile_strips) * BATCH;
    }

    __device__ __forceinline__ int begin_of_warp(int warp) const { return begin + (end - begin) * warp / WARPS; }

    // The last warp that begins at a strip or before.
    __device__ __forceinline__ int warp_of(int strip) const { return ((strip - begin + 1) * WARPS - 1) / (end - begin); }

    __device__ __forceinline__ int block_of(int strip) const {
        const int larger = more * (each + 1);
        return strip < larger ? strip / (each + 1) : more + (strip - larger) / each;
    }
};

__device__ __forceinline__ void read_chunk(Chunk& chunk, const Pieces& pieces, const Header& header, Word below) {
    chunk.mask[0] = header.low;
    chunk.mask[1] = header.high;
    pieces.read(chunk, 0, header.start + __popc(header.low & below));
    pieces.read(chunk, 1, header.middle + __popc(header.high & below));
}

// Adds a strip, of the tile's last `chunks` chunks.
template <int tile = 0> __device__ __forceinline__ void add_strip(Product& product, Stream& stream, int strip, int next, int chunks, Word bit) {
    Header headers[BATCH];
    Chunk pair[2];  // the next one is read before one is multiplied
    product.begin_strip(strip * kStripColumns, next * kStripColumns);
    stream.next(headers, chunks);
    stream.pieces.require(headers[BATCH - 1].end());
    read_chunk(pair[0], stream.pieces, headers[0], bit - 1);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        if (i + 1 < BATCH) read_chunk(pair[(i + 1) % 2], stream.pieces, headers[i + 1], bit - 1);
        product.template add<tile>(pair[i % 2], i, bit);
    }
}

struct Output {
    const SCALAR* __restrict__ bias;  // [n] or null
    SCALAR* __restrict__ y;           // [m, n]
    int m, n;
    const Product& from;

    __device__ __forceinline__ void write(int row, int token, float sum) const {
        if (row >= n || token >= m) return;
        const float product = from.final(sum, token);
        store(y + static_cast<long long>(token) * n + row, product + (bias ? to_float(bias[row]) : 0.0f));
    }
};

// A warp's run: `shares` gets what it has of a tile that began before (nothing if it has no strip), then of one that goes on after it.
__device__ __forceinline__ void sum_run(
    float (&shares)[2][kCells], Stream& stream, Product& product, const Division& division, const Output& output, int first, int left
) {
    int tile = first / division.tile_strips, strip = first - tile * division.tile_strips;
    const Word bit = pinned(1u << threadIdx.x % 32);
    product.begin_run(strip * kStripColumns);
    if (left == 0) product.each([&](int row, int token, float sum) { shares[0][token * kRows + row] = 0.0f; });
    while (left > 0) {
        const int until = min(strip + left, division.tile_strips);
        const bool begins = strip == 0, ends = until == division.tile_strips;
        left -= until - strip;
        for (; strip < until; ++strip) {
            const int next = strip + 1 < division.tile_strips ? strip + 1 : 0;
            add_strip(product, stream, strip, next, division.tile_chunks - strip * BATCH, bit);
        }
        if (begins && ends) {
            product.each([&](int row, int token, float sum) { output.write(tile * kRows + row, token, sum); });
        } else {
            float* share = shares[begins];
            product.each([&](int row, int token, float sum) { share[token * kRows + row] = sum; });
        }
        product.clear();
        strip = 0;
        ++tile;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) semisparse_gqs_decode(
    // Not __restrict__: loads that the compiler takes for constants could move before the wait for the previous kernel.
    const SCALAR* x,                  // [m, k]
    const uint2* masks,               // [chunks]
    const Word* starts,               // [chunks + 1]
    const char* codes,                // [kept, kGroupBytes]
    const char* scale,                // [kept], a SCALAR each
    const char* zero,                 // [kept]
    const SCALAR* __restrict__ bias,  // [n] or null
    SCALAR* __restrict__ y,           // [m, n]
    unsigned long long* parts,        // [blocks, kCells]: a block's share of a tile that goes on after it; 0 before and after
    int m, int n, int k, int tile_chunks, int chunks, int kept,
    int each, int more,               // a block's strips, and how many blocks have one more
    int share,                        // groups a warp that are asked for before the previous kernel ends; 0 if none are
    int early                         // whether the weight may be read before the previous kernel ends
) {
    extern __shared__ uint4 shared[];  // the warps' streams, then what products keep there
    const Weight weight = {masks, starts, codes, scale, zero, chunks, kept};
    const int warp = warp_of_block(), lane = threadIdx.x % 32;
    const Word at = shared_address(shared);
    STAMP(7); STAMP(0);
#if OWN
    __shared__ float sums[WARPS][TILES][kCells];
    const int tiles = (n + kRows - 1) / kRows, tile = TILES * blockIdx.x, tile_strips = (tile_chunks + BATCH - 1) / BATCH;
    const int begin = tile_strips * warp / WARPS, end = tile_strips * (warp + 1) / WARPS;
    const int first = tile * tile_chunks + begin * BATCH, last = tile * tile_chunks + (WHOLE ? end * BATCH : min(end * BATCH, tile_chunks));
#else
    __shared__ float shares[WARPS][2][kCells];
    const Division division(tile_chunks, each, more);
    const int run = division.begin_of_warp(warp), strips = division.begin_of_warp(warp + 1) - run;
    const int first = division.chunk_of(run), last = division.chunk_of(run + strips);
#endif
    if (share) weight.prefetch(first, last, (blockIdx.x * WARPS + warp) * share, share);
#if XFIRST == 2
    let_next_kernel_start();
#endif
    if (!early) wait_for_previous_kernel();
    STAMP(1);
#if XFIRST
    const Product::Asked asked(x, m, k);
#endif
    Stream stream(weight, pinned(at + warp * (kStreamBytes * TILES)), first, last);
#if OWN && TILES == 2
    const int further_chunks = min(1, tiles - 1 - tile) * tile_chunks;
    Stream second(weight, pinned(at + warp * (kStreamBytes * TILES) + kStreamBytes), first + further_chunks, last + further_chunks);
#endif
    if (early) wait_for_previous_kernel();
    let_next_kernel_start();
    STAMP(2);
#if !XFIRST
    const Product::Asked asked(x, m, k);
#endif
    Product product(asked, x, at + WARPS * kStreamBytes * TILES, m, k);
    STAMP(3);
    const Output output = {bias, y, m, n, product};
#if OWN
    const Word bit = pinned(1u << lane);
    product.begin_run(begin * kStripColumns);
#pragma unroll 1
    for (int strip = begin; strip < end; ++strip) {
        add_strip(product, stream, strip, strip + 1 < tile_strips ? strip + 1 : 0, tile_chunks - strip * BATCH, bit);
#if TILES == 2
        add_strip<1>(product, second, strip, strip + 1 < tile_strips ? strip + 1 : 0, tile_chunks - strip * BATCH, bit);
#endif
    }
    STAMP(4);
    product.each([&](int row, int token, float sum) { sums[warp][0][token * kRows + row] = sum; });
#if TILES == 2
    product.each<1>([&](int row, int token, float sum) { sums[warp][1][token * kRows + row] = sum; });
#endif
    __syncthreads();
    STAMP(5);
#pragma unroll 1
    for (int cell = threadIdx.x; cell < kRows * m * TILES; cell += 32 * WARPS) {
        const int which = TILES == 2 ? cell / kRows % 2 : 0, row = cell % kRows, token = cell / (kRows * TILES), at = token * kRows + row;
        float sum = sums[0][which][at];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) sum += sums[i][which][at];
        output.write((tile + which) * kRows + row, token, sum);
    }
    STAMP(6);
#else
    sum_run(shares[warp], stream, product, division, output, run, strips);
    STAMP(4);
    __syncthreads();
    // A warp a tile, the one that other blocks wait for first.
    const int first_tile = division.begin / division.tile_strips;
    for (int tile = (division.end - 1) / division.tile_strips - warp; tile >= first_tile; tile -= WARPS) {
        const int begin = tile * division.tile_strips, end = begin + division.tile_strips;
        const int from = max(begin, division.begin), to = min(end, division.end);
        const bool begins = from == begin;
        const int first = division.warp_of(from), last = division.warp_of(to - 1);
        if (begins && to == end && first == last) continue;
#pragma unroll 1
        for (int cell = lane; cell < kRows * m; cell += 32) {
            float total = 0.0f;
            if (to == end) {
                for (int block = division.block_of(begin); block < static_cast<int>(blockIdx.x); ++block) {
                    total += take_part(parts + static_cast<size_t>(block) * kCells + cell);
                }
            }
            float share = shares[first][begins][cell];
            for (int i = first + 1; i <= last; ++i) share += shares[i][0][cell];
            if (to == end) output.write(tile * kRows + cell % kRows, cell / kRows, total + share);
            else leave_part(parts + static_cast<size_t>(blockIdx.x) * kCells + cell, share);
        }
    }
    STAMP(6);
#endif
}
