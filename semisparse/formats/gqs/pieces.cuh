// A ring of pieces of a weight's groups in shared memory, a warp's own: codes, scales and zero points of SLOTS pieces of PIECE
// groups. Group i stands at place i % kRing of each.

#pragma once

#include "chunk.cuh"
#include "copies.cuh"

constexpr int kRing = SLOTS * PIECE;  // groups
constexpr int kGroupBytes = 4 * kWords;
constexpr int kVector = 16;           // bytes of which copies are made
constexpr int kScalesAt = kRing * kGroupBytes, kZerosAt = kScalesAt + 2 * kRing;
constexpr int kPiecesBytes = kZerosAt + kRing;  // of a warp
constexpr int kScaleLanes = 2 * PIECE / kVector, kZeroLanes = PIECE / kVector;
// A strip may lie in as many pieces as it has groups, and the one that it began in is not to be written over.
constexpr int kMost = SLOTS - 1 - (BATCH * 64 + PIECE - 1) / PIECE;
#ifdef DEPTH
constexpr int kDepth = DEPTH < kMost ? DEPTH : kMost;
#else
constexpr int kDepth = kMost;
#endif
static_assert(kDepth > 0 && PIECE % 64 == 0 && 3 * PIECE <= 32 * kVector && (SLOTS & SLOTS - 1) == 0, "the ring");

struct Weight {
    const uint2* masks;           // [chunks], low word first
    const Word* starts;           // [chunks + 1]
    const char* codes;            // [kept, kGroupBytes]
    const char* scale;            // [kept], a SCALAR each
    const char* zero;             // [kept]
    int chunks, kept;
};

// A lane's share of an array's copies: 16 bytes of each piece.
struct Share {
    const char* from;  // of group 0
    Word to;           // in shared memory, of place 0
    Word step;         // bytes of a group
    int limit;         // of the groups at which a piece begins: it has no such bytes, or they are not wanted

    // From byte `offset` of a piece on; of the last 16 bytes of an array all are read: they lie in one page.
    __device__ __forceinline__ Share(const char* array, Word at, Word step, int offset, int kept, int end)
        : from(pinned(array + offset)), to(pinned(at + offset)), step(step), limit(min(end, kept - offset / static_cast<int>(step))) {}

    __device__ __forceinline__ void copy(int group, Word place) const {
        if (group < limit) copy_async(to + place * step, further(from, group, step));
    }
};

struct Pieces {
    Word at;                 // in shared memory
    int asked, ready;        // groups: asked for up to; come up to
    Share codes, parameters; // the first copy of codes; scales by the first lanes, zero points by the next

    __device__ __forceinline__ Pieces(const Weight& weight, Word at, int begin, int end)
        : at(at), asked(begin / PIECE * PIECE), ready(asked), codes(weight.codes, at, kGroupBytes, kVector * lane(), weight.kept, end),
          parameters(lane() < kScaleLanes
              ? Share(weight.scale, at + kScalesAt, 2, kVector * lane(), weight.kept, end)
              : Share(weight.zero, at + kZerosAt, 1, kVector * (lane() - kScaleLanes), weight.kept, lane() < kScaleLanes + kZeroLanes ? end : 0)) {
#pragma unroll 1
        for (int i = 0; i < kDepth; ++i) ask();
    }

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

    // Asks for one more piece, if one is wanted.
    __device__ __forceinline__ void ask() {
        const Word place = opaque(asked & kRing - 1);
#pragma unroll
        for (int i = 0; i < PIECE; i += 32 * kVector / kGroupBytes) codes.copy(asked + i, place + i);
        parameters.copy(asked, place);
        commit_copies();
        asked += PIECE;
    }

    // Waits until all groups before `group` have come.
    __device__ __forceinline__ void require(int group) {
#pragma unroll 1
        while (any_of_warp(ready < group)) {
            wait_for_copies<kDepth - 1>();
            __syncwarp();
            ready += PIECE;
            ask();
        }
    }

    // A group's numbers; any for one that is not there.
    __device__ __forceinline__ void read(Chunk& chunk, int row, Word group) const {
        const Word place = opaque(group & kRing - 1);
        read_shared(chunk.codes[row], at + place * kGroupBytes);
        chunk.scale[row] = read_shared_half(at + kScalesAt + 2 * place);
        chunk.zero[row] = read_shared_byte(at + kZerosAt + place);
    }
};
