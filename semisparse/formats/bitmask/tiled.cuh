// A tile of the layout `tiles` (16 rows by 256 columns, a warp's work) and how a lane reads its own weights out of it.
//
// Lane 4 * g + t owns block t (64 columns) of the rows g and g + 8: its masks say where its own values stand, and no lane
// asks another. It writes its values to shared memory as overlapped pairs, slot a = (value a - 1, value a). For the columns
// (c, c + 1) the word at the slot "values up to and including column c" holds both their values in place; a byte-permute
// in sign mode turns the two mask bits into a blend mask, and one dp4a moves the slot on. Slots are 128 bytes apart and a
// lane's are in its own bank, so these accesses never conflict and need no barrier.
//
// KEEP is the number of values a block.

#pragma once

using Word = unsigned int;

constexpr int kWarp = 32;
constexpr int kRows = 16;                             // of a tile
constexpr int kColumns = 256;                         // of a tile
constexpr int kBlock = 64;                            // columns of one mask
constexpr int kSteps = kBlock / 4;                    // of four columns of each block
constexpr int kPairs = (KEEP + 1) / 2;                // words of a row's values in one lane
constexpr int kLaneWords = 4 + 2 * kPairs;
constexpr int kTileWords = kWarp * kLaneWords;
constexpr int kVectors = kLaneWords / 4;              // 16-byte accesses of a lane to a tile
constexpr bool kHalfVector = kLaneWords % 4 != 0;     // and one of 8 bytes
constexpr int kSlots = KEEP + 1;                      // of a lane and row
constexpr int kSlotBytes = kWarp * 4;
constexpr int kStageBytes = 2 * kSlots * kSlotBytes;  // of shared memory for a warp
constexpr Word kSigns = 0x80808080u;

struct Tile {
    Word words[kLaneWords];  // both rows' masks, then the first row's values, then the second's
};

__device__ __forceinline__ Word shared_address(const void* pointer) {
    return static_cast<Word>(__cvta_generic_to_shared(pointer));
}

// Volatile keeps these in the order written.
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

// Reads a lane's words. Weights are read once: they take no place in L1.
__device__ __forceinline__ void load(Tile& tile, const Word* from, int lane) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        Word* to = tile.words + 4 * i;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from + (i * kWarp + lane) * 4));
    }
    if (kHalfVector) {
        Word* to = tile.words + 4 * kVectors;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
            : "=r"(to[0]), "=r"(to[1]) : "l"(from + kVectors * kWarp * 4 + lane * 2));
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

    // Writes the values as overlapped pairs; past either end the half that no mask bit picks is zero.
    __device__ __forceinline__ void stage(const Word* values) const {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            const Word before = i >= 2 ? values[i / 2 - 1] : 0;
            const Word here = i / 2 < kPairs ? values[i / 2] : 0;
            write_shared(slot + i * kSlotBytes, i % 2 ? here : __byte_perm(before, here, 0x5432));
        }
    }

    // The weights in the columns 4 * step to 4 * step + 3, two in each word; steps are taken in order.
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

// A lane's two rows of a tile, staged; `stage` is the shared address of the lane's first slot.
struct Rows {
    Walk upper, lower;

    __device__ __forceinline__ Rows(const Tile& tile, Word stage)
        : upper{tile.words[0], tile.words[1], stage},
          lower{tile.words[2], tile.words[3], stage + kSlots * kSlotBytes} {
        upper.stage(tile.words + 4);
        lower.stage(tile.words + 4 + kPairs);
    }
};
