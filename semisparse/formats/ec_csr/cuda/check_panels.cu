// Whether the lists of row panels are what kernels rely on: for weights that are on a GPU when they are validated.
//
// Grid: (panels). CTA: one warp; lane l walks list l of the panel. `panel_loads` and `bases` have been checked before: every panel's
// loads lie in `values` and `deltas`.
// Shared memory: none.
//
// A fault is only counted: storage/check.py then looks for it with torch, and names it. A list without a fault has all positions
// inside the panel, rows in order, ends of rows at even entries only, weights in strictly ascending positions, so each once, and
// none past N or K.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8) and INDEX (unsigned short or unsigned int).

#include "ptx/word.cuh"

constexpr int kWarp = 32;
constexpr int kSegments = 16;
constexpr int kVector = 16 / sizeof(SCALAR);  // entries per load
constexpr int kRowMultiple = 2;
constexpr int kBits = 8 * sizeof(SCALAR);
constexpr int kDeltaBytes = kVector * DELTA_BITS / 8;
constexpr Word kMagnitude = sizeof(SCALAR) == 2 ? 0x7fffu : 0x7fffffffu;  // all bits but the sign

extern "C" __global__ void __launch_bounds__(kWarp) semisparse_ec_csr_check_panels(
    const uint4* values,          // [loads, 32]
    const unsigned char* deltas,  // [loads, 32, kDeltaBytes]
    const INDEX* bases,           // [panels, segments, 32]
    const int* panel_loads,       // [panels + 1]
    const int* rows,              // [panels, panel_rows], the weight's row of each row of a panel, n for none
    int* results,                 // [panels, 2]: faults, and the most rows that a segment covers
    int n, int k, int panel_rows, int lane_columns
) {
    const int lane = threadIdx.x, panel = blockIdx.x;
    const int start = panel_loads[panel], loads = panel_loads[panel + 1] - start, positions = panel_rows * lane_columns;
    int faults = 0, span = 1, reached = -1;  // reached: the position of the last weight
    for (int segment = 0; segment < kSegments; ++segment) {
        const int base = bases[(panel * kSegments + segment) * kWarp + lane];
        const int first = static_cast<int>(static_cast<long long>(segment) * loads / kSegments);
        const int end = static_cast<int>((segment + 1ll) * loads / kSegments);
        if (first < end && base != 0 && base < reached) ++faults;
        int position = base;
        for (int load = first; load < end && !faults; ++load) {
            const long long at = static_cast<long long>(start + load) * kWarp + lane;
            const uint4 loaded = values[at];
            const Word words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
            for (int i = 0; i < kVector; ++i) {
                const int byte = deltas[at * kDeltaBytes + i * DELTA_BITS / 8];
                const int delta = DELTA_BITS == 8 ? byte : byte >> i % 2 * 4 & 15;
                const int before = position / lane_columns;
                position += delta;
                if (position < 0 || position >= positions) {
                    ++faults;
                    break;
                }
                const int row = position / lane_columns, crossed = row - before;
                const bool weight = words[i * kBits / 32] >> i * kBits % 32 & kMagnitude;
                if (crossed > 1 || (i % kRowMultiple && crossed)) ++faults;
                if (rows[panel * panel_rows + row] >= n) ++faults;
                if (weight && (position <= reached || position % lane_columns * kWarp + lane >= k)) ++faults;
                if (weight) reached = position;
                span = max(span, row - base / lane_columns + 1);
            }
        }
    }
    const int most = __reduce_max_sync(0xffffffffu, span), any = __reduce_max_sync(0xffffffffu, faults);
    if (lane == 0) results[2 * panel] = any, results[2 * panel + 1] = most;
}
