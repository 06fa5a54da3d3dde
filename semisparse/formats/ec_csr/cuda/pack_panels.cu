// Row panels (README.md) from a dense weight: what a weight in panels of another height goes through on its way to a GPU.
//
// Grid: (panels). CTA: one warp; lane l walks the columns l, l + 32, ... of the panel's rows in order and makes its list. Launched
// twice: first without `panel_loads`, which writes the loads that each panel needs, then with them, which writes the lists. `values`,
// `deltas` and `bases` hold zeros before.
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
constexpr int kRowMultiple = 2;
constexpr int kAhead = 8;                     // weights of a lane in flight
constexpr int kDeltaBytes = kVector * DELTA_BITS / 8;
constexpr unsigned int kMagnitude = sizeof(SCALAR) == 2 ? 0x7fffu : 0x7fffffffu;  // all bits but the sign

// A lane's list: entries are put in order. It writes a load when it is full.
struct Lister {
    uint4* values;          // the lane's load 0; null to count only
    unsigned char* deltas;
    INDEX* bases;           // the lane's base of segment 0
    int loads;              // of the panel
    int limit, columns;     // maximum delta; columns per lane
    int count = 0, last = 0, in_row = 0, base_row = 0, span = 1;
    Word load_values[4] = {}, load_deltas[2] = {};

    // Whether load `load` is the first of its segment.
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

    // An entry at a position.
    __device__ __forceinline__ void entry(int position, SCALAR value) {
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
            for (int i = 0; i < kVector; ++i) {  // without an index that would move the arrays to local memory
                if (i != at) continue;
                load_values[i * kBits / 32] |= static_cast<Word>(value) << i * kBits % 32;
                load_deltas[i * DELTA_BITS / 32] |= delta << i * DELTA_BITS % 32;
            }
        }
        ++count, ++in_row, last = position;
        if (values && at == kVector - 1) flush();
    }

    // A row ends: its entries become even in number.
    __device__ __forceinline__ void end_row() {
        if (in_row % kRowMultiple) entry(last, 0);
        in_row = 0;
    }

    // A weight, and before it padding where the gap is too wide, in whichever rows it lies.
    __device__ __forceinline__ void put(int position, SCALAR value) {
        while (count > 0 && position - last > limit) {
            const int next = last + limit;
            if (next / columns != last / columns) end_row();
            entry(next, 0);
        }
        if (count > 0 && position / columns != last / columns) end_row();
        entry(position, value);
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
    Lister list{panel_loads ? values + first : nullptr, deltas + first * kDeltaBytes,
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
