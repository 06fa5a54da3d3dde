// Row panels (README.md) from a dense weight: what a weight in panels of another height goes through on its way to a GPU.
//
// Grid: (panels). CTA: one warp; lane l walks the columns l, l + 32, ... of the panel's rows in order and writes its list. A list is
// read in loads of kVector entries per lane. Launched twice: without `panel_loads` it counts the loads that each panel needs, with
// them it writes the lists. `values`, `deltas` and `bases` must be zero-filled.
// Shared memory: none.
//
// Bound by latency: a lane keeps kAhead loads in flight, and a GPU has a few panels per SM.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8) and INDEX (unsigned short or unsigned int, of
// bases).

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kSegments = 16;
constexpr int kVector = 16 / sizeof(SCALAR);  // entries per load
constexpr int kBits = 8 * sizeof(SCALAR);
constexpr int kRowMultiple = 2;               // a row has a multiple of this many entries in each list
constexpr int kAhead = 8;                     // weights of a lane in flight
constexpr int kDeltaBytes = kVector * DELTA_BITS / 8;
constexpr unsigned int kMagnitude = sizeof(SCALAR) == 2 ? 0x7fffu : 0x7fffffffu;  // all bits but the sign

// Appends entries to a lane's list, in the order of their positions: row in the panel * columns per lane + column of the lane.
// A load is collected in registers and stored when it is full.
struct ListWriter {
    uint4* values;          // the lane's load 0; null to count only
    unsigned char* deltas;
    INDEX* bases;           // the lane's base of segment 0
    int loads;              // of the panel
    int limit, columns;     // maximum delta; columns per lane
    int count = 0;          // entries so far
    int last = 0;           // position of the last one
    int in_row = 0;         // entries of the current row
    int base_row = 0;       // row of the segment's base
    int span = 1;           // the most rows that a segment covers
    Word load_values[4] = {}, load_deltas[2] = {};

    // The segment that begins with load `load`, or -1 if none does.
    __device__ __forceinline__ int begun_segment(int load) const {
        const int segment = ((load + 1) * kSegments - 1) / loads;
        return segment * loads / kSegments == load ? segment : -1;
    }

    __device__ __forceinline__ void flush() {
        const int load = (count - 1) / kVector;
        values[load * kWarp] = uint4{load_values[0], load_values[1], load_values[2], load_values[3]};
        unsigned char* to = deltas + load * (kWarp * kDeltaBytes);
#pragma unroll
        for (int i = 0; i < kDeltaBytes; ++i) to[i] = load_deltas[i / 4] >> i % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) load_values[i] = 0;
        load_deltas[0] = load_deltas[1] = 0;
    }

    // Appends one entry. The first of a segment has no delta: its position is the segment's base.
    __device__ __forceinline__ void append(int position, SCALAR value) {
        const int at = count % kVector;
        if (values) {
            Word delta = position - last;
            if (at == 0) {
                const int segment = begun_segment(count / kVector);
                if (segment >= 0) {
                    delta = 0, base_row = position / columns;
                    bases[segment * kWarp] = static_cast<INDEX>(position);
                }
            }
            span = max(span, position / columns - base_row + 1);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {  // indexed by `at`, the arrays would be in local memory
                if (i != at) continue;
                load_values[i * kBits / 32] |= static_cast<Word>(value) << i * kBits % 32;
                load_deltas[i * DELTA_BITS / 32] |= delta << i * DELTA_BITS % 32;
            }
        }
        ++count, ++in_row, last = position;
        if (values && at == kVector - 1) flush();
    }

    // Pads the row to kRowMultiple entries, by a zero at the last position.
    __device__ __forceinline__ void end_row() {
        if (in_row % kRowMultiple) append(last, 0);
        in_row = 0;
    }

    // Appends a weight. Where the gap before it exceeds the maximum delta, zeros `limit` apart come first; they may lie in
    // rows between.
    __device__ __forceinline__ void put(int position, SCALAR value) {
        while (count > 0 && position - last > limit) {
            const int next = last + limit;
            if (next / columns != last / columns) end_row();
            append(next, 0);
        }
        if (count > 0 && position / columns != last / columns) end_row();
        append(position, value);
    }
};

extern "C" __global__ void __launch_bounds__(kWarp) semisparse_ec_csr_pack_panels(
    const SCALAR* weight,     // [n, pitch], zeros from column k to the next multiple of 32
    const int* rows,          // [panels, panel_rows], the weight's row of each row of a panel, n for none
    const int* panel_loads,   // [panels + 1]; null in the first launch
    int* loads,               // [panels], written by the first launch
    uint4* values,            // [loads, 32], written by the second launch, as are the next three
    unsigned char* deltas,    // [loads, 32, kDeltaBytes]
    INDEX* bases,             // [panels, segments, 32]
    int* spans,               // [panels], the most rows that a segment of each panel covers
    int n, int pitch, int panel_rows, int lane_columns, int limit
) {
    const int lane = threadIdx.x, panel = blockIdx.x;
    const long long first = panel_loads ? static_cast<long long>(panel_loads[panel]) * kWarp + lane : 0;
    ListWriter list{panel_loads ? values + first : nullptr, deltas + first * kDeltaBytes,
                bases + static_cast<long long>(panel) * kSegments * kWarp + lane,
                panel_loads ? panel_loads[panel + 1] - panel_loads[panel] : 0, limit, lane_columns};
    for (int row = 0; row < panel_rows; ++row) {
        const int of = rows[panel * panel_rows + row];
        if (of >= n) continue;
        const SCALAR* from = weight + static_cast<long long>(of) * pitch + lane;
        for (int begin = 0; begin < lane_columns; begin += kAhead) {
            SCALAR ahead[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) ahead[i] = begin + i < lane_columns ? from[(begin + i) * kWarp] : static_cast<SCALAR>(0);
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (ahead[i] & kMagnitude) list.put(row * lane_columns + begin + i, ahead[i]);
        }
    }
    if (list.count) list.end_row();
    if (!panel_loads) {
        const int longest = __reduce_max_sync(0xffffffffu, list.count);
        if (lane == 0) loads[panel] = (longest + kVector - 1) / kVector;
        return;
    }
    if (list.count % kVector) list.flush();
    const int widest = __reduce_max_sync(0xffffffffu, list.span);
    if (lane == 0) spans[panel] = widest;
}
