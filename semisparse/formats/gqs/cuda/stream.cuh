// A warp's part of the weight, streamed from global to shared memory by cp.async.
//
// A warp multiplies a contiguous range of chunks, so its kept groups are contiguous in memory whatever the masks are. It
// copies them in stages of STAGE_GROUPS groups into a ring of its own, kStagesInFlight stages ahead: no copy waits for a mask.
// The chunks' headers (mask and start) are loaded 32 at a time, one per lane, and reach the other lanes through shared memory.
//
//   A warp's stream: | codes [kRing, 8 or 16 bytes] | scales [kRing] | zero points [kRing] | headers [2 * 32, 16 bytes] |
//
// Slot i % kRing of the first three holds group i, counted from GroupPipeline::base; slot i % 64 of the last the header of the
// range's chunk i.

#pragma once

#include "arrive_warp.cuh"
#include "chunk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/integer.cuh"
#include "ptx/shared.cuh"
#include "warp.cuh"

constexpr int kRing = STAGES * STAGE_GROUPS;  // groups
constexpr int kGroupBytes = 4 * kCodeWords;   // bytes of a group's codes
constexpr int kCopyBytes = 16;                // per cp.async
constexpr int kCopiedGroups = 32 * kCopyBytes / kGroupBytes;  // groups whose codes the lanes copy with one cp.async each
constexpr int kScaleLanes = 2 * STAGE_GROUPS / kCopyBytes, kZeroLanes = STAGE_GROUPS / kCopyBytes;
constexpr int kHeaderWindow = 32;  // chunks whose headers are loaded at once
constexpr int kScalesAt = kRing * kGroupBytes, kZerosAt = kScalesAt + 2 * kRing, kHeadersAt = kZerosAt + kRing;
constexpr int kStreamBytes = kHeadersAt + 2 * kHeaderWindow * 16;  // per warp

// While a k-tile is multiplied, its groups (up to 64 per chunk) and the rest of the stage in which they begin stay in the
// ring.
constexpr int kStagesInFlight = STAGES - 1 - (CHUNKS_PER_K_TILE * 64 + STAGE_GROUPS - 1) / STAGE_GROUPS;
static_assert(kStagesInFlight > 0 && STAGE_GROUPS % 64 == 0 && (STAGES & STAGES - 1) == 0, "the ring");
static_assert(kScaleLanes + kZeroLanes <= 32, "one copy of scales or zero points per lane");

struct Weight {
    const uint2* masks;  // [chunks], low word first
    const Word* starts;  // [chunks + 1]
    const char* codes;   // [kept, kGroupBytes]
    const char* scale;   // [kept], an Element each
    const char* zero;    // [kept]
    int chunks, kept;

    // Prefetches to L2 the first mask and the starts at both ends of chunks `first` to `end`, and the first `groups` groups of
    // this range. It may run before griddepcontrol.wait, when `starts` may not be written yet: the value is only a hint, and
    // clamped.
    __device__ __forceinline__ void prefetch(int first, int end, int groups) const {
        const int lane = threadIdx.x % 32;
        if (lane < 3) {
            prefetch_global_L2(lane == 0   ? static_cast<const void*>(starts + first)
                               : lane == 1 ? static_cast<const void*>(starts + end)
                                           : masks + first);
        }
        const int group = min(static_cast<int>(ld_relaxed_gpu(starts + first) & 0x7fffffff), kept) & ~(kCopyBytes - 1);
        groups = min(groups, kept - group) & ~(kCopyBytes - 1);
        if (groups > 0 && elect_sync()) {
            cp_async_bulk_prefetch_L2(mad_wide(group, kGroupBytes, codes), groups * kGroupBytes);
            cp_async_bulk_prefetch_L2(mad_wide(group, 2, scale), groups * 2);
            cp_async_bulk_prefetch_L2(mad_wide(group, 1, zero), groups);
        }
    }
};

// What a lane copies of each stage of one tensor (codes, scales or zero points): 16 bytes, or twice 16 of codes of 8 bits.
struct LaneCopy {
    const char* source;  // for a stage that begins at group 0
    Word destination;    // for a stage in ring slot 0
    Word group_bytes;
    int first_group;     // the first group in the 16 bytes, counted from the begin of the stage
    int end;             // stages that begin at this group or later are not copied: past the range, or fewer than 16 bytes left

    // Copies the `index`-th 16 bytes of each stage, for groups before `end`. `tensor` has `kept` groups; `ring` is its ring in
    // shared memory.
    __device__ __forceinline__ LaneCopy(const char* tensor, Word ring, Word group_bytes, int index, int end, int kept)
        : source(keep_in_register(tensor + kCopyBytes * index)),
          destination(keep_in_register(ring + kCopyBytes * index)),
          group_bytes(group_bytes),
          first_group(kCopyBytes * index / static_cast<int>(group_bytes)),
          end(min(end, kept - kCopyBytes / static_cast<int>(group_bytes) + 1) - first_group) {}

    // Copies from group `stage` + `offset`, where `stage` begins a stage, to ring slot `slot` + `offset`.
    __device__ __forceinline__ void copy(int stage, Word slot, int offset) const {
        if (stage + offset < end) {
            cp_async_16(destination + slot * group_bytes + offset * group_bytes,
                        mad_wide(stage, group_bytes, source) + offset * group_bytes);
        }
    }

    // Copies what `copy` leaves out at the tensor's end, `left` groups from here, byte by byte: compute-sanitizer takes a
    // shorter cp.async for one of all 16 bytes, of which some lie past the tensor.
    __device__ __forceinline__ void copy_tail(Word group, Word slot, int left) const {
        const int bytes = (left - first_group) * static_cast<int>(group_bytes);
        if (bytes >= kCopyBytes) return;
        const char* from = mad_wide(group, group_bytes, source);
#pragma unroll 1
        for (int i = 0; i < bytes; ++i) st_shared_u8(destination + slot * group_bytes + i, from[i]);
    }
};

// The ring of stages. Groups are counted from `base`, the first group of the first stage.
struct GroupPipeline {
    Word ring;                     // in shared memory
    Word code_bytes, scale_bytes;  // per group, in registers
    int base;                      // group of the weight, a multiple of 16
    int issued, arrived;           // number of groups whose copies have been issued, and have completed
    int kept;                      // number of the weight's groups from `base` on
    int tail;                      // first group of the stage in which the tensors end; -1 if that is past the range
    LaneCopy codes, scale_zero;    // scales by the first kScaleLanes lanes, zero points by the next kZeroLanes

    // Issues the first copies of the groups `begin` to `end` of the weight.
    __device__ __forceinline__ GroupPipeline(const Weight& weight, Word ring, int begin, int end)
        : ring(ring),
          code_bytes(keep_constant(kGroupBytes, weight.kept)),
          scale_bytes(keep_constant(2, weight.kept)),
          base(begin & ~(kCopyBytes - 1)),
          issued(0),
          arrived(0),
          kept(weight.kept - base),
          tail(kept / STAGE_GROUPS * STAGE_GROUPS < end - base ? kept / STAGE_GROUPS * STAGE_GROUPS : -1),
          codes(mad_wide(base, kGroupBytes, weight.codes), ring, kGroupBytes, lane(), end - base, kept),
          scale_zero(lane() < kScaleLanes
                         ? LaneCopy(mad_wide(base, 2, weight.scale), ring + kScalesAt, 2, lane(), end - base, kept)
                         : LaneCopy(mad_wide(base, 1, weight.zero), ring + kZerosAt, 1, lane() - kScaleLanes,
                                    copies_scale_zero() ? end - base : 0, kept)) {
#pragma unroll 1
        for (int i = 0; i < kStagesInFlight; ++i) issue_stage();
    }

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static bool copies_scale_zero() { return lane() < kScaleLanes + kZeroLanes; }

    // Issues the next stage's copies as one cp.async group; an empty one past the range.
    __device__ __forceinline__ void issue_stage() {
        const Word slot = opaque(issued & kRing - 1);
#pragma unroll
        for (int i = 0; i < STAGE_GROUPS; i += kCopiedGroups) codes.copy(issued, slot, i);
        scale_zero.copy(issued, slot, 0);
        if (issued == tail) {
#pragma unroll 1  // unrolled, the kernel for 16 tokens and 8 bits spills on Ampere
            for (int i = 0; i < STAGE_GROUPS; i += kCopiedGroups) codes.copy_tail(issued + i, slot + i, kept - issued - i);
            if (copies_scale_zero()) scale_zero.copy_tail(issued, slot, kept - issued);
        }
        cp_async_commit_group();
        issued += STAGE_GROUPS;
    }

    // Waits until all groups before `group` are in shared memory.
    __device__ __forceinline__ void wait_for(int group) {
        group = static_cast<int>(opaque(group));
#pragma unroll 1
        while (__any_sync(kAllLanes, arrived < group)) {
            cp_async_wait_group<kStagesInFlight - 1>();
            __syncwarp();
            arrived += STAGE_GROUPS;
            issue_stage();
        }
    }

    // Loads a group from the ring into one of the lane's two rows of a fragment. For a dropped group, the values loaded are not
    // used: they are those of the next kept group, whose copy may still be under way. For racecheck they are zeros then.
    __device__ __forceinline__ void load(ChunkFragment& chunk, int row, Word group) const {
        if (kForRacecheck && static_cast<int>(group) >= arrived) {
            for (Word& codes : chunk.codes[row]) codes = 0;
            chunk.scale[row] = chunk.zero[row] = 0;
            return;
        }
        const Word slot = opaque(group & kRing - 1);
        ld_shared_ordered(chunk.codes[row], mad_lo(slot, code_bytes, ring));
        chunk.scale[row] = ld_shared_ordered_u16(mad_lo(slot, scale_bytes, ring) + kScalesAt);
        chunk.zero[row] = ld_shared_ordered_u8(ring + kZerosAt + slot);
    }
};

struct ChunkHeader {
    Word low, high;          // masks of rows 0 to 7 and 8 to 15
    Word start, start_high;  // the first group of row 0, and of row 8, counted from GroupPipeline::base

    __device__ __forceinline__ Word end() const { return start_high + __popc(high); }
};

struct WeightStream {
    GroupPipeline groups;
    const Weight& weight;
    Word headers;             // address in shared memory of two windows of headers
    int first;                // first chunk of the range
    int in_shared, consumed;  // number of chunks whose headers have been stored in shared memory, or returned by next_k_tile
    uint2 mask;               // of this lane's chunk in the next window, in flight
    Word start;               // likewise

    // Begins to stream the chunks `first` to `end`; `smem` is the warp's shared memory.
    __device__ __forceinline__ WeightStream(const Weight& weight, Word smem, int first, int end)
        : groups(weight, smem, first < end ? weight.starts[first] : 0, first < end ? weight.starts[end] : 0),
          weight(weight),
          headers(smem + kHeadersAt),
          first(first),
          in_shared(0),
          consumed(0) {
        load_headers();
    }

    // Loads this lane's header of the window after those in shared memory.
    __device__ __forceinline__ void load_headers() {
        const int chunk = first + in_shared + static_cast<int>(threadIdx.x % 32);
        mask = weight.masks[min(chunk, weight.chunks - 1)];
        start = weight.starts[min(chunk, weight.chunks)] - groups.base;
    }

    // Stores headers in shared memory until those of the first `chunks` chunks are there.
    __device__ __forceinline__ void store_headers(int chunks) {
#pragma unroll 1
        while (__any_sync(kAllLanes, in_shared < chunks)) {
            const Word header[4] = {mask.x, mask.y, start, start + __popc(mask.x)};
            __syncwarp();
            st_shared_v4(headers + 16 * ((in_shared + threadIdx.x % 32) % (2 * kHeaderWindow)), header);
            __syncwarp();
            in_shared += kHeaderWindow;
            load_headers();
        }
    }

    // Returns the next k-tile's headers, and waits for its groups. The row tile has `left` chunks left; headers past them keep
    // no group.
    __device__ __forceinline__ void next_k_tile(ChunkHeader (&k_tile)[CHUNKS_PER_K_TILE], int left) {
        const int count = ALIGNED_K ? CHUNKS_PER_K_TILE : min(CHUNKS_PER_K_TILE, left);
        store_headers(consumed + count);
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_K_TILE; ++i) {
            // With ALIGNED_K no k-tile wraps around the windows.
            const Word from = consumed;
            const Word slot = ALIGNED_K ? from % (2 * kHeaderWindow) + i : (from + min(i, count - 1)) % (2 * kHeaderWindow);
            Word words[4];
            ld_shared_ordered(words, headers + 16 * slot);
            k_tile[i] = {words[0], words[1], words[2], words[3]};
            if (i >= count) k_tile[i] = {0, 0, k_tile[i].end(), k_tile[i].end()};
        }
        consumed += count;
        groups.wait_for(k_tile[CHUNKS_PER_K_TILE - 1].end());
    }

    // Loads the lane's two groups of a chunk; `lane_bit` is its bit of a mask word.
    __device__ __forceinline__ void load(ChunkFragment& chunk, const ChunkHeader& header, Word lane_bit) const {
        const Word below = lane_bit - 1;
        chunk.mask[0] = header.low;
        chunk.mask[1] = header.high;
        groups.load(chunk, 0, header.start + __popc(header.low & below));
        groups.load(chunk, 1, header.start_high + __popc(header.high & below));
    }
};
