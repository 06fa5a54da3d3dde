// Copies the tiles of a gqs weight to shared memory by bulk copies. Each consumer warp has one producer lane, which issues its
// copies. The lanes of a warp issue copies one after another, so these lanes are spread over all producer warps: with a single
// producer warp, W4S50 took 81 us instead of 66 (28672 x 8192, 16 tokens).
//
// A tile's groups are contiguous in global memory. A producer copies the tile's headers kAhead tiles before, by cp.async, and
// reads from them where the tile's groups begin and end. A bulk copy takes multiples of 16 bytes, so the last bytes of a
// tensor, fewer than 16, are copied one by one.

#pragma once

#include "expand_gemm/gemm.cuh"
#include "ptx/cp_async.cuh"
#include "warp.cuh"
#include "wgmma_tile.cuh"

constexpr int kAhead = 3;
constexpr int kHeaderTiles = STAGES + kAhead;  // tiles whose headers are in shared memory, per consumer warp
constexpr int kTileHeaderBytes = kChunks * kHeaderBytes;
constexpr int kWarpHeaderBytes = kHeaderTiles * kTileHeaderBytes;

// The bytes of a tensor that a tile needs, from a multiple of 16 on, as a bulk copy and a tail.
struct CopyRange {
    const char* from;  // in the tensor, at a multiple of 16 bytes from its begin
    int bulk, tail;    // bytes; the tail is the tensor's last ones, fewer than 16, or empty

    __device__ __forceinline__ CopyRange(const char* tensor, long long begin, int bytes, long long size) {
        const int skew = static_cast<int>(begin & 15);
        from = tensor + begin - skew;
        const long long left = size - begin + skew;  // bytes to the end of the tensor
        const int needed = round_up_16(bytes + skew);
        bulk = static_cast<int>(min(static_cast<long long>(needed), left & ~15ll));
        tail = bulk < needed ? static_cast<int>(left - bulk) : 0;
    }
    __device__ __forceinline__ void copy_tail(Word to) const {
#pragma unroll 1
        for (int i = bulk; i < bulk + tail; ++i) st_shared_u8(to + i, from[i]);
    }
    __device__ __forceinline__ void copy_bulk(Word to, Word mbarrier) const {
        if (bulk) cp_async_bulk(to, from, bulk, mbarrier);
    }
};

struct GroupStream;

// A gqs weight: the type Weights of expand_gemm/gemm.cuh.
struct Groups {
    static constexpr int kTileBytes = kGqsTileBytes;
    static constexpr int kExtraBytes = kConsumerWarps * kWarpHeaderBytes;
    static constexpr int kProducerRegisters = 56;
    static constexpr int kProducers = kConsumerWarps;
    using Stream = GroupStream;

    const uint2* masks;     // [row tiles, chunks], low word first
    const Word* starts;     // [row tiles * chunks + 1]
    const char* codes;      // [kept, kGroupBytes]
    const char* scale;      // [kept], an Element each
    const char* zero;       // [kept]
    int all_chunks, chunks;  // chunks of the weight, or of the stack of experts, and per row tile

    // Copies the headers of the tile at `cursor`. Those past the row's last chunk keep no group.
    __device__ __forceinline__ void copy_headers(Word to, const TileCursor& cursor) const {
        const int first = cursor.column / kParts * kChunks;
        const long long row = static_cast<long long>(cursor.weight_row) * chunks;
#pragma unroll
        for (int i = 0; i < kChunks; ++i, to += kHeaderBytes) {
            const bool exists = first + i < chunks;
            const long long at = row + min(first + i, chunks);
            if (exists) cp_async<8>(to, masks + at);
            else st_shared(to, 0), st_shared(to + 4, 0);
            cp_async<4>(to + 8, starts + at);
            cp_async<4>(to + 12, starts + at + exists);
        }
    }

    __device__ __forceinline__ void produce(const StreamMemory& memory, const WorkRanges& work, int first, int last, int warp,
                                            int lane) const {
        const int consumer = lane * kProducerWarps + warp;
        if (consumer >= kConsumerWarps) return;
        const Word tiles = memory.tiles + consumer * kTileBytes, headers = memory.extra + consumer * kWarpHeaderBytes;
        const long long kept = starts[all_chunks];
        const int count = (last + kParts - 1) / kParts - first / kParts;
        TileCursor ahead(work, first / kParts * kParts, consumer);
        int copied = 0, slot = 0;  // number of tiles whose headers are copied; slot of the next ones
        auto copy_next_headers = [&] {
            if (copied++ < count) copy_headers(headers + slot * kTileHeaderBytes, ahead);
            cp_async_commit_group();
            slot = slot + 1 == kHeaderTiles ? 0 : slot + 1;
#pragma unroll
            for (int i = 0; i < kParts; ++i) ahead.advance();
        };
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) copy_next_headers();
        PipelineState<STAGES> state;
        int current = 0;  // slot of the current tile's headers
#pragma unroll 1
        for (int i = 0; i < count; ++i, state.advance()) {
            mbarrier_wait_parity(memory.pipeline.empty(state.stage), state.parity ^ 1);
            copy_next_headers();
            cp_async_wait_group<kAhead>();
            const Word header = headers + current * kTileHeaderBytes;
            current = current + 1 == kHeaderTiles ? 0 : current + 1;
            const Word begin = ld_shared_ordered(header + 8);
            const int groups = static_cast<int>(ld_shared_ordered(header + kTileHeaderBytes - 4) - begin);
            const CopyRange code_copy(codes, static_cast<long long>(begin) * kGroupBytes, groups * kGroupBytes,
                                      kept * kGroupBytes);
            const CopyRange scale_copy(scale, 2ll * begin, 2 * groups, 2 * kept), zero_copy(zero, begin, groups, kept);
            const Word to = tiles + state.stage * kConsumerWarps * kTileBytes, full = memory.pipeline.full(state.stage);
            code_copy.copy_tail(to);
            scale_copy.copy_tail(to + kCodesBytes);
            zero_copy.copy_tail(to + kCodesBytes + kScaleBytes);
            mbarrier_arrive_expect_tx(full, code_copy.bulk + scale_copy.bulk + zero_copy.bulk);
            code_copy.copy_bulk(to, full);
            scale_copy.copy_bulk(to + kCodesBytes, full);
            zero_copy.copy_bulk(to + kCodesBytes + kScaleBytes, full);
        }
    }
};

// A consumer warp's tiles: the type Stream of expand_gemm/gemm.cuh.
struct GroupStream {
    Pipeline pipeline;
    Word tiles, headers;  // the warp's, addresses in shared memory
    Word code_mask;       // in a register: an instruction takes only one constant
    int last, lane;       // last: end of the iterations, exclusive
    PipelineState<STAGES> state;
    int slot = 0;         // of the tile's headers
    bool waited = false;  // whether the tile has arrived

    __device__ __forceinline__ GroupStream(const Groups& weight, const StreamMemory& memory, const WorkRanges&, int, int last,
                                           int warp, int lane)
        : pipeline(memory.pipeline), tiles(memory.tiles + warp * kGqsTileBytes),
          headers(memory.extra + warp * kWarpHeaderBytes),
          code_mask(keep_constant(::code_mask(kElement), weight.all_chunks)), last(last), lane(lane) {}

    __device__ __forceinline__ TileExpander acquire(int iteration) {
        if (kParts == 1 || !waited) mbarrier_wait_parity(pipeline.full(state.stage), state.parity);
        waited = true;
        return TileExpander(tiles + state.stage * kConsumerWarps * kGqsTileBytes, headers + slot * kTileHeaderBytes, 1u << lane,
                            iteration % kParts, code_mask);
    }

    __device__ __forceinline__ void release(int iteration) {
        if (iteration % kParts != kParts - 1 && iteration + 1 != last) return;
        mbarrier_arrive_warp(pipeline.empty(state.stage), lane);
        state.advance();
        slot = slot + 1 == kHeaderTiles ? 0 : slot + 1;
        waited = false;
    }
};
