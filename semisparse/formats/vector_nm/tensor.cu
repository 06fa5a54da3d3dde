// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n] in 16-bit types, on tensor cores.
//
// A block computes TOKENS x ROWS, a warp 16 * PER_WARP x 32 of it by mma.m16n8k16 with tokens as the 16-row operand. k runs
// over slots. A lane (g, t), g = lane / 4 and t = lane % 4, owns four slots of each 16 and reads of each eight tokens of its
// column of x at once, and its rows of the weights straight from memory; pairs of slots are then put side by side in
// registers. Which tokens and rows a lane's fragments stand for is free, so they are those that it can read together: tokens
// 8 g to 8 g + 7 of every 64 and consecutive rows, of which it later stores eight at once.
//
// Eight lanes read shared memory at a time: two g and all four t. A column stands 32 bytes further along the banks than the
// one before, so that they meet in no bank if the columns of the four t differ mod 4; prepare.cu orders slots accordingly.
// Sums are float32 in a fixed order: every run gives the same bits.
//
// Compiled for PER_WARP (mma tiles of tokens in a warp, a multiple of 4), TOKENS, ROWS, THREADS and the macros of staging.cuh.

#include "ptx/mma.cuh"
#include "staging.cuh"

constexpr int kStep = 16;   // slots of an mma
constexpr int kRounds = 4;  // slots of a lane in a step
constexpr int kRowsOfWarp = 32;
constexpr int kChunks = PER_WARP / 4;  // of eight tokens of a lane
constexpr int kTokensOfWarp = 64 * kChunks;
constexpr int kWarpsAlongTokens = TOKENS / kTokensOfWarp;
constexpr int kShared = LENGTH < kRowsOfWarp ? LENGTH : kRowsOfWarp;  // rows of a warp that share a group
constexpr int kOwners = kRowsOfWarp / kShared;                        // groups of a warp
constexpr int kOwn = kShared / 8;                                     // rows of a lane in each: 1, 2 or 4
constexpr int kWords = kOwn == 4 ? 2 : 1;
constexpr int kSteps = SLOTS / kStep;  // of a stage
constexpr int kBytesOfColumn = kColumnPitch * sizeof(SCALAR);
constexpr Word kLow = 0x5410, kHigh = 0x7632;  // selectors: the low, or high, halves of two words

static_assert(PER_WARP % 4 == 0 && TOKENS % kTokensOfWarp == 0, "whole chunks of tokens");
static_assert(THREADS == kWarp * kWarpsAlongTokens * (ROWS / kRowsOfWarp), "a warp for each part of the tile");
static_assert(SLOTS % kStep == 0 && LENGTH % 8 == 0, "whole mma steps");

using Sums = float[kChunks][4][kOwners * kOwn][4];  // by chunk, pair of tokens and eight rows of an mma

// A lane's four slots of a step, one for each round: place of the column in the stage, and above it the slot; see prepare.cu.
struct Slots {
    Word of_round[kRounds];

    __device__ __forceinline__ int slot(int round) const { return static_cast<int>(of_round[round]) >> 16; }
};

struct StageSlots {
    Slots of[kSteps][kOwners];
};

// The places alone, two in a word: what is still needed once the weights have been asked for.
struct StagePlaces {
    Word pairs[kSteps][kOwners][kRounds / 2];

    __device__ __forceinline__ explicit StagePlaces(const StageSlots& slots) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int owner = 0; owner < kOwners; ++owner) {
                const Word(&entries)[kRounds] = slots.of[step][owner].of_round;
                pairs[step][owner][0] = __byte_perm(entries[0], entries[1], kLow);
                pairs[step][owner][1] = __byte_perm(entries[2], entries[3], kLow);
            }
        }
    }

    __device__ __forceinline__ int place(int step, int owner, int round) const {
        const Word pair = pairs[step][owner][round / 2];
        return round % 2 ? pair >> 16 : pair & 0xffff;
    }
};

using Weights = Word[kOwners][kRounds][kWords];  // of a step; rows of a lane, two in a word

// Where a lane finds its slots and weights in memory.
struct Reader {
    const uint4* slots;    // of the stage whose slots are read next
    const SCALAR* values;  // the lane's rows in the warp's first group, of the stage whose weights are read next
    int left;              // stages whose slots are to be read
    int next_group[kOwners];

    __device__ __forceinline__ Reader(const Operands& from, int first_row) : left(from.stages) {
        const int lane = threadIdx.x % kWarp;
        const int group = first_row / kSpan;
        const int row = static_cast<int>((blockIdx.y * 1LL * ROWS + first_row) % LENGTH);
        // Past the last group its values are read again: those rows are not stored.
        const int last = from.groups - 1;
        const int own = min(from.first_group() + group, last);
#pragma unroll
        for (int owner = 0; owner < kOwners; ++owner) {
            next_group[owner] = (min(from.first_group() + group + owner, last) - own) * from.total * LENGTH;
        }
        slots = reinterpret_cast<const uint4*>(from.slots_of_block() + group * SLOTS) + lane % 4;
        values = from.values + static_cast<long long>(own) * from.total * LENGTH + row + lane / 4 * kOwn;
    }

    // Past the last stage there are no slots. It is no branch round the loads: reads of x would not move across it.
    __device__ __forceinline__ void read_slots(StageSlots& to) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int owner = 0; owner < kOwners; ++owner) {
                const int at = (owner * SLOTS + step * kStep) / 4;
                const uint4 four = left > 0 ? __ldg(slots + at) : uint4{~0u, ~0u, ~0u, ~0u};
                Word(&entries)[kRounds] = to.of[step][owner].of_round;
                entries[0] = four.x;
                entries[1] = four.y;
                entries[2] = four.z;
                entries[3] = four.w;
            }
        }
        slots += kGroups * SLOTS / 4;
        --left;
    }

    __device__ __forceinline__ void read_weights(Weights& to, const Slots (&of)[kOwners]) const {
#pragma unroll
        for (int owner = 0; owner < kOwners; ++owner) {
#pragma unroll
            for (int round = 0; round < kRounds; ++round) {
                const int slot = of[owner].slot(round);
                Word(&words)[kWords] = to[owner][round];
                words[0] = 0;
                words[kWords - 1] = 0;
                // Past the last slot there are no weights.
                if (slot < 0) continue;
                const SCALAR* rows = values + next_group[owner] + slot * LENGTH;
                if (kOwn == 4) {
                    const uint2 both = __ldg(reinterpret_cast<const uint2*>(rows));
                    words[0] = both.x;
                    words[kWords - 1] = both.y;
                } else if (kOwn == 2) {
                    words[0] = __ldg(reinterpret_cast<const Word*>(rows));
                } else {
                    words[0] = __ldg(reinterpret_cast<const unsigned short*>(rows));
                }
            }
        }
    }
};

using Chunk = Word[kRounds][4];  // eight tokens of a lane's four columns

__device__ __forceinline__ void read_chunk(Chunk& to, const StagePlaces& places, int step, int owner, const char* columns,
                                           int chunk) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const char* column = columns + places.place(step, owner, round) * kBytesOfColumn;
        column += chunk * 64 * static_cast<int>(sizeof(SCALAR));
        const uint4 eight = *reinterpret_cast<const uint4*>(column);
        to[round][0] = eight.x;
        to[round][1] = eight.y;
        to[round][2] = eight.z;
        to[round][3] = eight.w;
    }
}

__device__ __forceinline__ void multiply(Sums& sums, const Chunk& x, const Weights& weights, int owner, int chunk) {
    const Word(&w)[kRounds][kWords] = weights[owner];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const Word a[4] = {__byte_perm(x[0][pair], x[1][pair], kLow), __byte_perm(x[0][pair], x[1][pair], kHigh),
                           __byte_perm(x[2][pair], x[3][pair], kLow), __byte_perm(x[2][pair], x[3][pair], kHigh)};
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const Word half = own % 2 ? kHigh : kLow;
            mma_m16n8k16(sums[chunk][pair][owner * kOwn + own], a, __byte_perm(w[0][own / 2], w[1][own / 2], half),
                __byte_perm(w[2][own / 2], w[3][own / 2], half), static_cast<const SCALAR*>(nullptr));
        }
    }
}

struct alignas(sizeof(SCALAR) * 2 * kOwn) Rows {
    SCALAR of[2 * kOwn];
};

// A lane holds 2 * kOwn consecutive rows of each group, of each of its tokens.
__device__ __forceinline__ void write(const Sums& sums, int first_token, int first_row, const SCALAR* bias, SCALAR* y, int m,
                                      int n, bool vectors) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int owner = 0; owner < kOwners; ++owner) {
        const int row = blockIdx.y * ROWS + first_row + owner * kShared + lane % 4 * 2 * kOwn;
        float added[2 * kOwn];
#pragma unroll
        for (int i = 0; i < 2 * kOwn; ++i) added[i] = bias && row + i < n ? to_float(bias[row + i]) : 0.0f;
#pragma unroll
        for (int of_lane = 0; of_lane < kChunks * 8; ++of_lane) {
            const int token = blockIdx.x * TOKENS + first_token + of_lane / 8 * 64 + lane / 4 * 8 + of_lane % 8;
            if (token >= m) continue;
            Rows out;
#pragma unroll
            for (int i = 0; i < 2 * kOwn; ++i) {
                const float(&of)[4] = sums[of_lane / 8][of_lane % 8 / 2][owner * kOwn + i % kOwn];
                store(out.of + i, of[of_lane % 2 * 2 + i / kOwn] + added[i]);
            }
            SCALAR* to = y + static_cast<long long>(token) * n + row;
            if (vectors && row + 2 * kOwn <= n) {
                *reinterpret_cast<Rows*>(to) = out;
            } else {
#pragma unroll
                for (int i = 0; i < 2 * kOwn; ++i)
                    if (row + i < n) to[i] = out.of[i];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) semisparse_vector_nm_tensor(
    const SCALAR* __restrict__ by_column, const SCALAR* __restrict__ values, const int* __restrict__ columns,
    const int* __restrict__ slots, const SCALAR* __restrict__ bias, SCALAR* __restrict__ y,
    int m, int n, int pitch, int groups, int total, int stages,
    int vectors  // whether every row of y is 16-byte aligned
) {
    extern __shared__ uint4 shared[];
    const Operands operands{by_column, values, columns, slots, pitch, groups, total, stages};
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int first_token = warp % kWarpsAlongTokens * kTokensOfWarp;
    const int first_row = warp / kWarpsAlongTokens * kRowsOfWarp;
    ColumnStager stager(operands);
    Reader reader(operands, first_row);
    // Slots are asked for a stage before the weights, and those for as long before they are multiplied: with less between
    // slots and weights the compiler waits for both at once (220 TFLOP/s on an H200 at 50 %, bfloat16).
    StageSlots ahead, coming;
    Weights weights[kSteps];
    reader.read_slots(ahead);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) reader.read_weights(weights[step], ahead.of[step]);
    reader.read_slots(coming);
    Sums sums = {};
    for_each_stage<kColumnBytes>(
        stages, reinterpret_cast<char*>(shared),
        [&](char* buffer, bool last) {
            stager.copy(reinterpret_cast<SCALAR*>(buffer));
            if (!last) stager.look_ahead();
        },
        [&](const char* buffer) {
            const char* columns = buffer + (first_token + lane / 4 * 8) * sizeof(SCALAR);
            const StagePlaces here(ahead);
            ahead = coming;
            reader.values += SLOTS * LENGTH;
            reader.read_slots(coming);
            constexpr int parts = kOwners * kChunks;  // of a step
            Chunk x[2];
            read_chunk(x[0], here, 0, 0, columns, 0);
#pragma unroll
            for (int i = 0; i < kSteps * parts; ++i) {
                const int next = i + 1;
                // Columns are on their way while those before are multiplied, weights for as long as a stage takes.
                if (next < kSteps * parts) {
                    read_chunk(x[next % 2], here, next / parts, next % parts / kChunks, columns, next % kChunks);
                }
                multiply(sums, x[i % 2], weights[i / parts], i % parts / kChunks, i % kChunks);
                if (next % parts == 0) reader.read_weights(weights[i / parts], ahead.of[i / parts]);
            }
        });
    write(sums, first_token, first_row, bias, y, m, n, vectors != 0);
}
