// A ring of pieces of a weight's groups in shared memory, a warp's own: codes, scales and zero points of SLOTS pieces of PIECE
// groups. Groups are counted from `base` on, where the first piece begins; group i stands at place i % kRing of each.

#pragma once

#include "chunk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"

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
        if (lane < 3) prefetch_global_L2(lane == 0 ? static_cast<const void*>(starts + from) : lane == 1 ? static_cast<const void*>(starts + to) : masks + from);
        const int group = min(static_cast<int>(ld_relaxed_gpu(starts + from) & 0x7fffffff), kept) & ~(kVector - 1);
        count = min(count, kept - group) & ~(kVector - 1);
        if (count > 0 && elect_sync()) {
            cp_async_bulk_prefetch_L2(mad_wide(group, kGroupBytes, codes), count * kGroupBytes);
            cp_async_bulk_prefetch_L2(mad_wide(group, 2, scale), count * 2);
            cp_async_bulk_prefetch_L2(mad_wide(group, 1, zero), count);
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
        if (piece + more < limit) cp_async_16(to + place * step + more * step, mad_wide(piece, step, from) + more * step);
    }

    // Where only `left` groups are left of the array, what `copy` leaves out.
    __device__ __forceinline__ void copy_rest(Word group, Word place, int left) const {
        const int bytes = (left - first) * static_cast<int>(step);
        if (bytes >= kVector) return;
        const char* source = mad_wide(group, step, from);
        // Not by a shorter copy: compute-sanitizer takes it for 16 bytes, of which some lie behind the array.
#pragma unroll 1
        for (int i = 0; i < bytes; ++i) st_shared_u8(to + place * step + i, source[i]);
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
          codes(mad_wide(base, kGroupBytes, weight.codes), at, kGroupBytes, lane(), end - base, kept),
          parameters(lane() < kScaleLanes
                         ? Share(mad_wide(base, 2, weight.scale), at + kScalesAt, 2, lane(), end - base, kept)
                         : Share(mad_wide(base, 1, weight.zero), at + kZerosAt, 1, lane() - kScaleLanes, has_parameters() ? end - base : 0, kept)) {
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
        cp_async_commit_group();
        asked += PIECE;
    }

    // Waits until all groups before `group` have come.
    __device__ __forceinline__ void require(int group) {
        group = static_cast<int>(opaque(group));
#pragma unroll 1
        while (any_of_warp(ready < group)) {
            cp_async_wait_group<kDepth - 1>();
            __syncwarp();
            ready += PIECE;
            ask();
        }
    }

    // A group's numbers; any for one that is not there.
    __device__ __forceinline__ void read(Chunk& chunk, int row, Word group) const {
        const Word place = opaque(group & kRing - 1);
        ld_shared_ordered(chunk.codes[row], mad_lo(place, code_bytes, at));
        chunk.scale[row] = ld_shared_ordered_u16(mad_lo(place, scale_bytes, at) + kScalesAt);
        chunk.zero[row] = ld_shared_ordered_u8(at + kZerosAt + place);
    }
};
