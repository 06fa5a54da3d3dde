// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] for a bitmask weight in the layout `tiles` and m of 1 to TOKENS.
//
// A warp turns a tile of 16 rows by 256 columns into 16 fragments of mma.m16n8k16 with the weights as the 16-row operand;
// tokens are the 8 columns of the other, so one token and eight cost the same pass. Lane 4 * g + t owns block t (64 columns)
// of the rows g and g + 8: its masks say where its own values stand, and no lane asks another. Each mma step takes 4
// columns of every lane's block, so the fragment's 16 columns are a permutation of K, which x follows.
//
// Expanding: a lane writes its values to shared memory as overlapped pairs, slot a = (value a - 1, value a). For the
// columns (c, c + 1) the word at the slot "values up to and including column c" holds both their values in place; a
// byte-permute in sign mode turns the two mask bits into a blend mask, and one dp4a moves the slot on. Slots are 128 bytes
// apart and a lane's are in its own bank, so these accesses never conflict and need no barrier.
//
// A block computes ROW_TILES tiles of rows at a time, SPLITS warps to each, the columns dealt out among them; blocks walk
// over the rows. A warp's next tile is in flight while it computes one. Sums are float32 and reduced in a fixed order:
// every run gives the same bits.
//
// Compiled for SCALAR (half or bfloat16, of x, w and bias), OUT (of y), KEEP (values a block), TOKENS (8 or 16), SPLITS,
// ROW_TILES.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Word = unsigned int;

constexpr int kWarp = 32;
constexpr int kRows = 16;           // of a tile
constexpr int kColumns = 256;       // of a tile
constexpr int kSteps = 16;          // mma steps in a tile
constexpr int kPairs = (KEEP + 1) / 2;           // words of a row's values in one lane
constexpr int kVectors = 1 + kPairs / 2;         // 16-byte accesses of a lane to a tile
constexpr bool kHalfVector = kPairs % 2;         // and one of 8 bytes
constexpr int kLaneWords = 4 + 2 * kPairs;
constexpr int kTileWords = kWarp * kLaneWords;
constexpr int kSlots = KEEP + 1;                 // of a lane and row
constexpr int kSlotBytes = kWarp * sizeof(Word);
constexpr int kStageBytes = 2 * kSlots * kSlotBytes;  // of a warp
constexpr int kWarps = SPLITS * ROW_TILES;
constexpr int kThreads = kWarps * kWarp;
constexpr int kUnit = 8;                         // values of x in 16 bytes
constexpr int kUnits = kColumns / kUnit;
constexpr int kHead = 2;                         // units of x that a thread holds while weights are asked for
constexpr int kTokenGroups = TOKENS / 8;
constexpr Word kSigns = 0x80808080u;

struct Tile {
    Word words[kLaneWords];  // both rows' masks, then the first row's values, then the second's
};

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void store(__half* place, float value) { *place = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(float* place, float value) { *place = value; }

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&w)[4], Word low, Word high, const __half*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ void mma(float (&sums)[4], const Word (&w)[4], Word low, Word high, const __nv_bfloat16*) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ Word shared_address(const void* pointer) {
    return static_cast<Word>(__cvta_generic_to_shared(pointer));
}

// Volatile keeps these in the order written: left to itself the compiler hoists all of x and spills.
__device__ __forceinline__ Word read_shared(Word address) {
    Word value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint4 read_shared4(Word address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ void write_shared(Word address, Word value) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(value));
}

// Weights are read once: they take no place in L1.
__device__ __forceinline__ void load(Tile& tile, const Word* from, int lane) {
    const Word* vectors = from + lane * 4;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        Word* to = tile.words + 4 * i;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(vectors + i * kWarp * 4));
    }
    if (kHalfVector) {
        Word* to = tile.words + 4 * kVectors;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
            : "=r"(to[0]), "=r"(to[1]) : "l"(from + kVectors * kWarp * 4 + lane * 2));
    }
}

// Writes a row's values as overlapped pairs; past either end the half that no mask bit picks is zero.
__device__ __forceinline__ void stage(const Word* values, Word slots) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        const Word before = slot >= 2 ? values[slot / 2 - 1] : 0;
        const Word here = slot / 2 < kPairs ? values[slot / 2] : 0;
        write_shared(slots + slot * kSlotBytes, slot % 2 ? here : __byte_perm(before, here, 0x5432));
    }
}

// Spreads the signs of four bytes: unlike __byte_perm, the instruction takes a selector's highest bit for "only the sign".
__device__ __forceinline__ Word spread_signs(Word low, Word high, Word selector) {
    Word mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(low), "r"(high), "r"(selector));
    return mask;
}

// Walks over one row of a lane's block, four columns a step.
struct Walk {
    Word low, high;  // the mask's halves
    Word slot;       // shared address of the slot of the last column counted

    // The weights in the columns 4 * step to 4 * step + 3, two in each word.
    template <int step>
    __device__ __forceinline__ uint2 take() {
        const Word bits = (step < 8 ? low : high) << step % 8;
        const Word after = step == 7 ? high : step == 15 ? low : bits << 1;
        const int signs = bits & kSigns;
        // Byte 0 is the column before these four; at step 0 it is column 63's bit and does not count yet.
        const Word first = __dp4a(signs, step ? 0x0000ffff : 0x0000ff00, static_cast<int>(slot));
        slot = __dp4a(signs, static_cast<int>(step ? 0xffffffffu : 0xffffff00u), static_cast<int>(slot));
        return uint2{read_shared(first) & spread_signs(bits, bits, 0xaa99),
                     read_shared(slot) & spread_signs(bits, after, 0xccbb)};
    }
};

// Adds a tile's products. `x` are the shared addresses of the lane's token and block, for tokens 0 to 7 and 8 to 15.
template <int step = 0>
__device__ __forceinline__ void multiply(float (&sums)[2][kTokenGroups][4], Walk& upper, Walk& lower,
                                         const Word (&x)[kTokenGroups], uint4 (&held)[kTokenGroups]) {
    const uint2 a = upper.take<step>();
    const uint2 b = lower.take<step>();
    const Word weights[4] = {a.x, b.x, a.y, b.y};
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
        if (step % 2 == 0) held[i] = read_shared4(x[i] + step / 2 * 16);
        mma(sums[step % 2][i], weights, step % 2 ? held[i].z : held[i].x, step % 2 ? held[i].w : held[i].y,
            static_cast<const SCALAR*>(nullptr));
    }
    if constexpr (step + 1 < kSteps) multiply<step + 1>(sums, upper, lower, x, held);
}

// x lies in shared memory token by token in units of 8 values, one unit in nine skipped, so that lanes meet in no bank.
__device__ __forceinline__ int padded(int unit) { return unit + unit / kUnit; }

__device__ __forceinline__ int panel_pitch(int tiles) { return tiles * padded(kUnits) + (tiles % 2 ? 0 : 4); }

// Columns of x to bring to shared memory: [first, first + tiles * 256), zero past column k.
struct Source {
    const SCALAR* x;
    int m, k, first, tiles;
    bool vectors;  // whether k and x allow 16-byte accesses

    __device__ __forceinline__ int units() const { return tiles * kUnits; }

    __device__ __forceinline__ uint4 unit(int token, int at) const {
        const int column = first + at * kUnit;
        if (column >= k) return uint4{};
        return __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(token) * k + column));
    }

    // Copies all but the units that the block's threads held back.
    __device__ __forceinline__ void copy(uint4* panel, int held_back) const {
        const int pitch = panel_pitch(tiles);
        if (vectors) {
#pragma unroll 1
            for (int at = threadIdx.x; at < units(); at += kThreads) {
#pragma unroll 4
                for (int token = at < held_back; token < m; ++token) panel[token * pitch + padded(at)] = unit(token, at);
            }
        } else {
#pragma unroll 1
            for (int token = 0; token < m; ++token) {
#pragma unroll 4
                for (int i = threadIdx.x; i < units() * kUnit; i += kThreads) {
                    SCALAR* to = reinterpret_cast<SCALAR*>(panel + token * pitch + padded(i / kUnit)) + i % kUnit;
                    *to = first + i < k ? x[static_cast<long long>(token) * k + first + i] : SCALAR(0.0f);
                }
            }
        }
    }
};

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

extern "C" __global__ void __launch_bounds__(kWarps * kWarp MIN_BLOCKS) bitmask_tiled_decode(
    const SCALAR* __restrict__ x,      // [m, k]
    const Word* __restrict__ tiles,    // [row_tiles, column_tiles, kTileWords]
    const SCALAR* __restrict__ bias,   // [n] or null
    OUT* __restrict__ y,               // [m, n]
    int m, int n, int k, int row_tiles, int column_tiles,
    int panel_tiles,                   // tiles of x that shared memory holds
    int vectors,                       // whether every row of x is 16-byte aligned
    int dependent                      // whether this launch may begin before the previous kernel ends
) {
    extern __shared__ uint4 shared[];
    __shared__ float partial[2][kWarps][TOKENS][kRows];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int split = warp % SPLITS;
    const Word slots = shared_address(shared) + warp * kStageBytes + lane * 4;
    uint4* panel = shared + kWarps * kStageBytes / 16;
    const int stride = gridDim.x * ROW_TILES;
    const int first_group = blockIdx.x * ROW_TILES;
    int row_tile = first_group + warp / SPLITS;
    const Word* next = tiles + (static_cast<long long>(row_tile) * column_tiles + split) * kTileWords;

    Tile tile;
    const bool any = row_tile < row_tiles && split < column_tiles;
    let_next_kernel_start();
    // Weights before x where the previous kernel may still be writing x; else one token's x first, lest it queue behind.
    const Source source{x, m, k, 0, min(panel_tiles, column_tiles), vectors != 0};
    const int held_back = source.vectors ? kHead * kThreads : 0;
    uint4 head[kHead];
    if (any && (dependent || !XFIRST)) load(tile, next, lane);
    if (dependent) wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kHead; ++i) {
        const int at = threadIdx.x + i * kThreads;
        if (at < min(held_back, source.units())) head[i] = source.unit(0, at);
    }
    if (any && !dependent && XFIRST) load(tile, next, lane);
#pragma unroll
    for (int i = 0; i < kHead; ++i) {
        const int at = threadIdx.x + i * kThreads;
        if (at < min(held_back, source.units())) panel[padded(at)] = head[i];
    }
    source.copy(panel, held_back);
    __syncthreads();

    int parity = 0;
    // Every warp of a block walks as often, whether or not its tile of rows exists.
    for (int group = first_group; group < row_tiles; group += stride, row_tile += stride, parity ^= 1) {
        float sums[2][kTokenGroups][4] = {};
        for (int first = 0; first < column_tiles; first += panel_tiles) {
            const int held = min(panel_tiles, column_tiles - first);
            if (panel_tiles < column_tiles && (group != first_group || first)) {
                __syncthreads();
                Source{x, m, k, first * kColumns, held, vectors != 0}.copy(panel, 0);
                __syncthreads();
            }
            const int pitch = panel_pitch(held);
            Word of_x[kTokenGroups];
#pragma unroll
            for (int i = 0; i < kTokenGroups; ++i) {
                const int token = min(lane / 4 + 8 * i, m - 1);
                of_x[i] = shared_address(panel) + (token * pitch + padded(lane % 4 * kUnit) + padded(split * kUnits)) * 16;
            }
            for (int column_tile = first + split; row_tile < row_tiles && column_tile < first + held; column_tile += SPLITS) {
                Walk upper{tile.words[0], tile.words[1], slots};
                Walk lower{tile.words[2], tile.words[3], slots + kSlots * kSlotBytes};
                stage(tile.words + 4, upper.slot);
                stage(tile.words + 4 + kPairs, lower.slot);
                // The next tile: further along these rows, or the first of the next rows.
                const bool more_columns = column_tile + SPLITS < column_tiles;
                if (more_columns || row_tile + stride < row_tiles) {
                    next = more_columns ? next + SPLITS * kTileWords
                        : tiles + (static_cast<long long>(row_tile + stride) * column_tiles + split) * kTileWords;
                    load(tile, next, lane);
                }
                uint4 x_units[kTokenGroups];
                multiply(sums, upper, lower, of_x, x_units);
#pragma unroll
                for (int i = 0; i < kTokenGroups; ++i) of_x[i] += SPLITS * (kUnits + kUnits / kUnit) * 16;
            }
        }
        // Lane 4 * g + t holds the rows g and g + 8 of the tokens 2 t and 2 t + 1.
#pragma unroll
        for (int i = 0; i < 4 * kTokenGroups; ++i) {
            const int token = lane % 4 * 2 + i % 2 + i / 4 * 8;
            if (token < m) partial[parity][warp][token][lane / 4 + i / 2 % 2 * 8] = sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
        }
        __syncthreads();
        for (int i = split * kWarp + lane; i < m * kRows; i += SPLITS * kWarp) {
            const int row = row_tile * kRows + i % kRows;
            if (row_tile >= row_tiles || row >= n) continue;
            float sum = bias ? to_float(bias[row]) : 0.0f;
#pragma unroll
            for (int j = 0; j < SPLITS; ++j) sum += partial[parity][warp - split + j][i / kRows][i % kRows];
            store(y + static_cast<long long>(i / kRows) * n + row, sum);
        }
    }
}
