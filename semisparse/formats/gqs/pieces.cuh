// A ring of pieces of a weight's groups in shared memory, a warp's own: codes, scales and zero points of SLOTS pieces of PIECE
// groups. Groups are counted from `base` on, where the first piece begins; group i stands at place i % kRing of each.

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
constexpr int kDepth = SLOTS - 1 - (BATCH * 64 + PIECE - 1) / PIECE;
static_assert(kDepth > 0 && PIECE % 64 == 0 && 3 * PIECE <= 32 * kVector && (SLOTS & SLOTS - 1) == 0, "the ring");

struct Weight {
    const uint2* masks;  // [chunks], low word first
    const Word* starts;  // [chunks + 1]
    const char* codes;   // [kept, kGroupBytes]
    const char* scale;   // [kept], a SCALAR each
    const char* zero;    // [kept]
    int chunks, kept;

    // Has L2 bring the headers of the chunks `from` to `to`, and their first `count` groups.
    __device__ __forceinline__ void prefetch(int from, int to, int count) const {
        const int lane = threadIdx.x % 32;
        if (lane < 3) prefetch_line(lane == 0 ? static_cast<const void*>(starts + from) : lane == 1 ? static_cast<const void*>(starts + to) : masks + from);
        const int group = min(static_cast<int>(hint_of(starts + from) & 0x7fffffff), kept) & ~(kVector - 1);
        count = min(count, kept - group) & ~(kVector - 1);
        if (count > 0 && one_of_warp()) {
            prefetch_lines(further(codes, group, kGroupBytes), count * kGroupBytes);
            prefetch_lines(further(scale, group, 2), count * 2);
            prefetch_lines(further(zero, group, 1), count);
        }
    }
};

// A lane's share of an array's copies: 16 bytes of each piece, from its group `first` on.
struct Share {
    const char* from;  // of group 0
    Word to;           // in shared memory, of place 0
    Word step;         // bytes of a group
    int first;
    int limit;         // the lane copies of the pieces that begin before: of others its 16 bytes are not wanted, or not all there

    // `at` is of the array's place 0, `index` of the lane's 16 bytes; of the groups up to `end` and `kept`.
    __device__ __forceinline__ Share(const char* array, Word at, Word step, int index, int end, int kept)
        : from(pinned(array + kVector * index)), to(pinned(at + kVector * index)), step(step),
          first(kVector * index / static_cast<int>(step)), limit(min(end, kept - kVector / static_cast<int>(step) + 1) - first) {}

    // Of the piece that begins at group `piece`; `more` groups further where the lanes copy more than once.
    __device__ __forceinline__ void copy(int piece, Word place, int more) const {
        if (piece + more < limit) copy_async(to + place * step + more * step, further(from, piece, step) + more * step);
    }

    // Where only `left` groups are left of the array, what `copy` leaves out.
    __device__ __forceinline__ void copy_rest(Word group, Word place, int left) const {
        const int bytes = (left - first) * static_cast<int>(step);
        if (bytes >= kVector) return;
        const char* source = further(from, group, step);
        // Not by a shorter copy: compute-sanitizer takes it for 16 bytes, of which some lie behind the array.
#pragma unroll 1
        for (int i = 0; i < bytes; ++i) write_shared_byte(to + place * step + i, source[i]);
    }
};

struct Pieces {
    Word at;                  // in shared memory
    Word code_bytes, scale_bytes;  // of a group
    int base;                 // of the weight's groups, where others are counted from
    int asked, ready;         // groups: asked for up to; come up to
    int kept;                 // groups from base on
    int cut;                  // where the piece begins that the arrays end in; -1 if it is not wanted
    Share codes, parameters;  // the first copy of codes; scales by the first lanes, zero points by the next

    // The groups from `begin` up to `end`.
    __device__ __forceinline__ Pieces(const Weight& weight, Word at, int begin, int end)
        : at(at), code_bytes(kept_constant(kGroupBytes, weight.kept)), scale_bytes(kept_constant(2, weight.kept)), base(begin & ~(kVector - 1)), asked(0), ready(0), kept(weight.kept - base),
          cut(kept / PIECE * PIECE < end - base ? kept / PIECE * PIECE : -1),
          codes(further(weight.codes, base, kGroupBytes), at, kGroupBytes, lane(), end - base, kept),
          parameters(lane() < kScaleLanes
                         ? Share(further(weight.scale, base, 2), at + kScalesAt, 2, lane(), end - base, kept)
                         : Share(further(weight.zero, base, 1), at + kZerosAt, 1, lane() - kScaleLanes, has_parameters() ? end - base : 0, kept)) {
#pragma unroll 1
        for (int i = 0; i < kDepth; ++i) ask();
    }

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static bool has_parameters() { return lane() < kScaleLanes + kZeroLanes; }

    // Asks for one more piece, if one is wanted.
    __device__ __forceinline__ void ask() {
        const Word place = opaque(asked & kRing - 1);
#pragma unroll
        for (int i = 0; i < PIECE; i += 32 * kVector / kGroupBytes) codes.copy(asked, place, i);
        parameters.copy(asked, place, 0);
        if (asked == cut) {
#pragma unroll 1  // else the build for 16 tokens in 8 bits spills on Ampere
            for (int i = 0; i < PIECE; i += 32 * kVector / kGroupBytes) codes.copy_rest(asked + i, place + i, kept - asked - i);
            if (has_parameters()) parameters.copy_rest(asked, place, kept - asked);
        }
        commit_copies();
        asked += PIECE;
    }

    // Waits until all groups before `group` have come.
    __device__ __forceinline__ void require(int group) {
        group = static_cast<int>(opaque(group));
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
        read_shared(chunk.codes[row], times_plus(place, code_bytes, at));
        chunk.scale[row] = read_shared_half(times_plus(place, scale_bytes, at) + kScalesAt);
        chunk.zero[row] = read_shared_byte(at + kZerosAt + place);
    }
};
