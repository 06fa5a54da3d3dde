// A warp's run of the weight, passing through shared memory: its groups in pieces of PIECE, kDepth of them on their way, asked
// for in the order in which they are stored, so no copy waits for a mask; its masks and starts 32 chunks at a time.

#pragma once

#include "chunk.cuh"
#include "pieces.cuh"

constexpr int kStripColumns = BATCH * kColumns;
constexpr int kWindow = 32;  // chunks whose headers are read at once, one a lane; shared memory has two windows
constexpr int kHeadersAt = kPiecesBytes, kStreamBytes = kHeadersAt + 2 * kWindow * 16;  // of a warp

// Of a chunk: its mask, and how many groups of the run's are stored before its first row and before its row 8.
struct Header {
    Word low, high, start, middle;

    __device__ __forceinline__ Word end() const { return middle + __popc(high); }
};

struct Stream {
    Pieces pieces;
    const Weight& weight;
    Word headers;      // the windows, in shared memory
    int first;         // the run's first chunk
    int seen, passed;  // chunks from there: whose headers lie in shared memory; multiplied
    uint2 mask;        // of this lane's chunk of the next window
    Word start;        // likewise

    // The chunks from `from` up to `to`; `at` is the warp's place in shared memory.
    __device__ __forceinline__ Stream(const Weight& weight, Word at, int from, int to)
        : pieces(weight, at, from < to ? weight.starts[from] : 0, from < to ? weight.starts[to] : 0),
          weight(weight), headers(at + kHeadersAt), first(from), seen(0), passed(0) {
        look_ahead();
    }

    __device__ __forceinline__ void look_ahead() {
        const int chunk = first + seen + static_cast<int>(threadIdx.x % 32);
        mask = weight.masks[min(chunk, weight.chunks - 1)];
        start = weight.starts[min(chunk, weight.chunks)] - pieces.base;
    }

    // Passes a strip, of the tile's last `left` chunks. Of those past the tile's end no group is kept.
    __device__ __forceinline__ void next(Header (&strip)[BATCH], int left) {
        const int count = WHOLE ? BATCH : min(BATCH, left);
        show(passed + count);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            // A whole strip does not go round the windows' end.
            const Word from = passed, slot = WHOLE ? from % (2 * kWindow) + i : (from + min(i, count - 1)) % (2 * kWindow);
            Word words[4];
            ld_shared_ordered(words, headers + 16 * slot);
            strip[i] = {words[0], words[1], words[2], words[3]};
            if (i >= count) strip[i] = {0, 0, strip[i].end(), strip[i].end()};
        }
        passed += count;
    }

    // Makes readable the headers of so many chunks of the run.
    __device__ __forceinline__ void show(int chunks) {
#pragma unroll 1
        while (any_of_warp(seen < chunks)) {
            const Word header[4] = {mask.x, mask.y, start, start + __popc(mask.x)};
            __syncwarp();
            st_shared_v4(headers + 16 * ((seen + threadIdx.x % 32) % (2 * kWindow)), header);
            __syncwarp();
            seen += kWindow;
            look_ahead();
        }
    }
};
