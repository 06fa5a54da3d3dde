// y[m, n] = sum_k x[m, k] * w[n, k] for a gqs weight with groups of 16 in 4 or 8 bits, and m of 1 to 8 * SETS.
//
// A chunk is 16 rows by 4 groups of 16 columns: what four m16n8k16 products take, the weights as their 16-row operand and
// up to 8 tokens in their columns. Lane l looks after group l % 4 of the rows l / 4 and l / 4 + 8. The four products take
// its 16 columns in their own order: the columns of a fragment are a permutation that weights and x share. So a lane
// needs no other lane's weights, and a chunk's bit l (l + 32 for the second row) says whether it has any.
//
// Stream-K: the chunks of all tiles of 16 rows, one after another, are cut into equal runs, one a block. The warps of a
// block share the chunks of a tile and add up in shared memory. A tile that several blocks share is finished by the one
// that comes last, which adds the parts of all in the order of the blocks: every run gives the same bits.
//
// Compiled for SCALAR (__half or __nv_bfloat16, of x, scale, bias and y), BITS (4 or 8), SETS (of 8 tokens: 1 or 2), WARPS
// (of a block), BATCH (chunks that a warp loads at once) and ALIGNED (1: k is a multiple of 8).

#include "primitives.cuh"

constexpr int kRows = 16;
constexpr int kSize = 16;                        // columns of a group
constexpr int kColumns = 4 * kSize;              // of a chunk
constexpr int kCells = kRows * 8 * SETS;         // sums of a tile
constexpr int kWords = kSize * BITS / 32;        // of a group's codes

struct Header {
    Word low, high;  // masks of rows 0 to 7 and 8 to 15
    int start;       // groups stored before
};

struct Chunk {
    Word codes[2][kWords];  // of the lane's two rows
    Word scale[2];          // twice in a word; 0 where the group is dropped
    Word zero[2];           // as stored
    Word x[SETS][8];        // the lane's token, 16 columns
};

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ __half2 half_pair(Word bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ __nv_bfloat162 bfloat_pair(Word bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

// Four pairs of columns from eight 4-bit codes: (code - zero) is exact in both dtypes, and its product with the scale is
// rounded once, as `unpack` does. 0x5400 is 64 as a half, whose last place is 1/16; 0x4180 is 16 in bfloat16.
__device__ __forceinline__ void dequantise4(Word (&pairs)[4], Word codes, Word scale, Word zero, const __half*) {
    const __half2 point = half_pair(0x54005400u | zero * 0x10001u);
    const Word shifted[4] = {codes << 4, codes, codes >> 4, codes >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 code = half_pair((shifted[i] & 0x00f000f0u) | 0x54005400u);
        pairs[i] = bits_of(__hmul2(__hsub2(code, point), half_pair(scale)));
    }
}

__device__ __forceinline__ void dequantise4(Word (&pairs)[4], Word codes, Word scale, Word zero, const __nv_bfloat16*) {
    const __nv_bfloat162 point = __float2bfloat162_rn(static_cast<float>(zero) * 0.0625f);
    const __nv_bfloat162 sixteen = bfloat_pair(0x41804180u);
    const Word shifted[4] = {codes << 3, codes >> 1, codes >> 5, codes >> 9};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 code = __hsub2(bfloat_pair((shifted[i] & 0x00780078u) | 0x41804180u), sixteen);
        pairs[i] = bits_of(__hmul2(__hsub2(code, point), bfloat_pair(scale)));
    }
}

// Two pairs of columns from four 8-bit codes, which stand as the columns 0, 2, 4, 6 or 1, 3, 5, 7 of eight.
__device__ __forceinline__ Word dequantise8(Word even, Word odd, int i, Word scale, Word zero, const __half*) {
    const Word code = __byte_perm(__byte_perm(even, odd, i | (i + 4) << 4), 0x64646464u, 0x4140);  // 1024 + code
    const __half2 point = half_pair(0x64006400u | zero * 0x10001u);
    return bits_of(__hmul2(__hsub2(half_pair(code), point), half_pair(scale)));
}

__device__ __forceinline__ Word dequantise8(Word even, Word odd, int i, Word scale, Word zero, const __nv_bfloat16*) {
    const float step = to_float(bfloat_pair(scale).x);
    const float first = static_cast<float>(static_cast<int>(even >> 8 * i & 255) - static_cast<int>(zero)) * step;
    const float second = static_cast<float>(static_cast<int>(odd >> 8 * i & 255) - static_cast<int>(zero)) * step;
    return bits_of(__floats2bfloat162_rn(first, second));
}

__device__ __forceinline__ void dequantise(Word (&pairs)[8], const Word (&codes)[kWords], Word scale, Word zero) {
    const SCALAR* tag = nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if BITS == 4
        Word part[4];
        dequantise4(part, codes[half], scale, zero, tag);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[4 * half + i] = part[i];
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[4 * half + i] = dequantise8(codes[2 * half], codes[2 * half + 1], i, scale, zero, tag);
        }
#endif
    }
}

struct Weight {
    const uint2* __restrict__ masks;             // [chunks], low word first
    const int* __restrict__ starts;              // [chunks + 1]
    const Word* __restrict__ codes;              // [kept, kWords]
    const unsigned short* __restrict__ scale;    // [kept], a SCALAR each
    const unsigned char* __restrict__ zero;      // [kept]
};

__device__ __forceinline__ Header read_header(const Weight& weight, int chunk, int end) {
    if (chunk >= end) return {0, 0, 0};
    const uint2 mask = __ldg(weight.masks + chunk);
    return {mask.x, mask.y, __ldg(weight.starts + chunk)};
}

__device__ __forceinline__ void read_group(Chunk& chunk, const Weight& weight, int row, bool kept, int place) {
    chunk.scale[row] = 0;
    chunk.zero[row] = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) chunk.codes[row][i] = 0;
    if (!kept) return;
#if BITS == 4
    const uint2 codes = __ldg(reinterpret_cast<const uint2*>(weight.codes) + place);
    chunk.codes[row][0] = codes.x;
    chunk.codes[row][1] = codes.y;
#else
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(weight.codes) + place);
    chunk.codes[row][0] = codes.x;
    chunk.codes[row][1] = codes.y;
    chunk.codes[row][2] = codes.z;
    chunk.codes[row][3] = codes.w;
#endif
    chunk.scale[row] = __ldg(weight.scale + place) * 0x10001u;
    chunk.zero[row] = __ldg(weight.zero + place);
}

// The lane's token takes 16 columns from `column` on; what lies past m or k is zero.
__device__ __forceinline__ void read_x(Word (&words)[8], const SCALAR* x, int token, int m, int column, int k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = 0;
    if (token >= m) return;
    const SCALAR* place = x + static_cast<long long>(token) * k + column;
#if ALIGNED
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (column + 8 * half >= k) continue;
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
        if (column + 2 * i < k) words[i] = __ldg(bits + 2 * i);
        if (column + 2 * i + 1 < k) words[i] |= static_cast<Word>(__ldg(bits + 2 * i + 1)) << 16;
    }
#endif
}

__device__ __forceinline__ void multiply_chunk(float (&sums)[SETS][4], const Chunk& chunk) {
    Word upper[8], lower[8];
    dequantise(upper, chunk.codes[0], chunk.scale[0], chunk.zero[0]);
    dequantise(lower, chunk.codes[1], chunk.scale[1], chunk.zero[1]);
    const SCALAR* tag = nullptr;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const Word rows[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            mma(sums[set], rows, chunk.x[set][i], chunk.x[set][i + 1], tag);
        }
    }
}

// Adds the chunks first + warp, first + warp + WARPS ... below end, of the tile whose chunk 0 is `origin`.
__device__ __forceinline__ void sum_chunks(
    float (&sums)[SETS][4], const Weight& weight, const SCALAR* x, int origin, int first, int end, int m, int k
) {
    const int lane = threadIdx.x % 32;
    const Word below = (1u << lane) - 1;
    int next = first + threadIdx.x / 32;
    Header headers[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) headers[i] = read_header(weight, next + i * WARPS, end);
    while (next < end) {
        Chunk chunks[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const Header header = headers[i];
            const int second = header.start + __popc(header.low);
            read_group(chunks[i], weight, 0, header.low >> lane & 1, header.start + __popc(header.low & below));
            read_group(chunks[i], weight, 1, header.high >> lane & 1, second + __popc(header.high & below));
            const int column = (next + i * WARPS - origin) * kColumns + lane % 4 * kSize;
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const bool any = (header.low | header.high) != 0;
                read_x(chunks[i].x[set], x, any ? lane / 4 + 8 * set : m, m, column, k);
            }
        }
        next += BATCH * WARPS;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) headers[i] = read_header(weight, next + i * WARPS, end);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) multiply_chunk(sums, chunks[i]);
    }
}

// Leaves the block's sums of a tile in cells[0 .. kCells), token after token of row after row.
__device__ __forceinline__ void add_warps(float* cells, const float (&sums)[SETS][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), token = 8 * set + lane % 4 * 2 + i % 2;
            cells[warp * kCells + row * 8 * SETS + token] = sums[set][i];
        }
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < kCells; cell += 32 * WARPS) {
        float total = cells[cell];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) total += cells[i * kCells + cell];
        cells[cell] = total;  // read and written by this thread alone
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) semisparse_gqs_decode(
    const SCALAR* __restrict__ x,             // [m, k]
    const uint2* __restrict__ masks,          // [chunks]
    const int* __restrict__ starts,           // [chunks + 1]
    const Word* __restrict__ codes,           // [kept, kWords]
    const unsigned short* __restrict__ scale, // [kept]
    const unsigned char* __restrict__ zero,   // [kept]
    const SCALAR* __restrict__ bias,          // [n] or null
    SCALAR* __restrict__ y,                   // [m, n]
    float* __restrict__ parts,                // [blocks, 2, kCells]: a block's share of its first and of its last tile
    int* __restrict__ arrivals,               // [tiles], zero before and after
    int m, int n, int k, int tile_chunks, int chunks
) {
    __shared__ float cells[WARPS * kCells];
    __shared__ bool last;
    const Weight weight = {masks, starts, codes, scale, zero};
    const int blocks = gridDim.x;
    const auto begin_of = [&](int block) { return static_cast<int>(static_cast<long long>(chunks) * block / blocks); };
    const int end = begin_of(blockIdx.x + 1);
    for (int first = begin_of(blockIdx.x); first < end;) {
        const int tile = first / tile_chunks, origin = tile * tile_chunks;
        const int stop = min(end, origin + tile_chunks);
        float sums[SETS][4] = {};
        sum_chunks(sums, weight, x, origin, first, stop, m, k);
        add_warps(cells, sums);
        bool whole = first == origin && stop == origin + tile_chunks;
        if (!whole) {
            const bool begins_here = first == origin;
            float* part = parts + (2ll * blockIdx.x + begins_here) * kCells;
            for (int cell = threadIdx.x; cell < kCells; cell += 32 * WARPS) part[cell] = cells[cell];
            __threadfence();
            __syncthreads();
            // The blocks of this tile: from the one that holds its first chunk to the one that holds its last.
            const auto block_of = [&](int chunk) {
                int block = static_cast<int>(static_cast<long long>(chunk) * blocks / chunks);
                while (begin_of(block + 1) <= chunk) ++block;
                return block;
            };
            const int from = block_of(origin), to = block_of(origin + tile_chunks - 1);
            if (threadIdx.x == 0) {
                last = atomicAdd(arrivals + tile, 1) == to - from;
                if (last) arrivals[tile] = 0;
                __threadfence();
            }
            __syncthreads();
            whole = last;
            if (whole) {
                for (int cell = threadIdx.x; cell < kCells; cell += 32 * WARPS) {
                    float total = 0.0f;
                    for (int block = from; block <= to; ++block) {
                        total += __ldcg(parts + (2ll * block + (block == from)) * kCells + cell);
                    }
                    cells[cell] = total;
                }
            }
        }
        if (whole) {
            for (int cell = threadIdx.x; cell < kCells; cell += 32 * WARPS) {
                const int row = tile * kRows + cell / (8 * SETS), token = cell % (8 * SETS);
                if (row < n && token < m) {
                    store(y + static_cast<long long>(token) * n + row, cells[cell] + (bias ? to_float(bias[row]) : 0.0f));
                }
            }
        }
        first = stop;
    }
}
