// weight[n, 32 * lane columns] from row panels: the dense weight, rows padded with zeros to whole lanes.
//
// Grid: (panels * tiles of a panel). A CTA makes a tile, `tile_positions` consecutive positions of a panel: the 32 columns of
// a position are neighbours in memory. CTA: WARPS warps. The CTA writes zeros to the tile in shared memory. Then its warps
// scatter the weights of all segments that reach into the tile; a segment is cut into PARTS parts, one per warp. Last, the CTA
// copies the tile to global memory, whole lines at a time.
// Shared memory: the tile, tile_positions * 32 values; then 32 words, of which 16 flag the segments that reach into it.
//
// What bounds it (70 %, H200; README.md): CTAs wait at barriers and for memory, because each of an SM's two CTAs either
// scatters or copies, not both at once. L2 is 53 to 59 % busy. Segments at a tile's ends are read by two CTAs, so larger tiles
// are faster.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8), INDEX (unsigned short or unsigned int,
// of bases), PANEL_ROWS (at most 64), PAIRED, PARTS, WARPS (16 at least) and CTAS_PER_SM (that registers leave room for).

#include "lists.cuh"
#include "panel_row.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = WARPS * kWarp;
constexpr int kUnit = kWarp * sizeof(SCALAR);  // bytes per position
constexpr int kStages = 2;                     // loads in flight while one is used
constexpr int kSkippedLoads = 4;               // deltas in flight while a part's first position is computed

// Whether a segment whose lanes begin at `base`, and the next at `next`, may reach into the positions from `begin` to `end`. A
// segment without entries in a lane begins at 0 there.
__device__ __forceinline__ bool reaches(Word base, Word next, Word begin, Word end) {
    return __any_sync(kAllLanes, base < end) && __any_sync(kAllLanes, next >= begin || next == 0);
}

// The index of the `number`-th bit that is set.
__device__ __forceinline__ int find_bit(Word bits, int number) {
    const int lane = threadIdx.x % kWarp;
    const bool mine = bits >> lane & 1 && __popc(bits & ((1u << lane) - 1)) == number;
    return __ffs(__ballot_sync(kAllLanes, mine)) - 1;
}

// Writes those of a load's weights that lie inside the tile; `position` is in bytes from its begin.
__device__ __forceinline__ void scatter(const Load& load, char* lane_tile, Word size, int& position) {
    const Positions<kUnit> positions(load.deltas);
#pragma unroll
    for (int entry = 0; entry < kVector; ++entry) {
        const int at = positions.after(position, entry);
        if (positions.restarts_after(entry)) position = at;
        const Word word = load.word(entry);
        const SCALAR value = sizeof(SCALAR) == 2 && entry % 2 ? word >> 16 : word;
        // A zero of either sign is padding.
        if (static_cast<Word>(at) < size && static_cast<SCALAR>(value << 1)) *reinterpret_cast<SCALAR*>(lane_tile + at) = value;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM) semisparse_ec_csr_unpack(
    const uint4* values,     // [loads, 32], kVector values each
    const void* deltas,      // [loads, 32], kVector deltas each
    const INDEX* bases,      // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    uint4* weight,           // [n, lane_columns, 32]
    int n, int lane_columns, int tiles, int tile_positions  // tiles: per panel
) {
    extern __shared__ __align__(16) char shared[];  // the tile; which segments reach into it
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int panel = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int begin = tile * tile_positions, end = min(begin + tile_positions, kPanelRows * lane_columns);
    Word* reached = reinterpret_cast<Word*>(shared + tile_positions * kUnit);

    for (int at = threadIdx.x; at < tile_positions * (kUnit / 16); at += kThreads) {
        reinterpret_cast<uint4*>(shared)[at] = uint4{};
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int start = panel_loads[panel], loads = panel_loads[panel + 1] - start;
    const INDEX* own_bases = bases + panel * kSegments * kWarp + lane;
    if (warp < kSegments) {
        const Word next = warp + 1 < kSegments ? own_bases[(warp + 1) * kWarp] : 0;
        const bool reach = reaches(own_bases[warp * kWarp], next, begin, end);
        if (lane == 0) reached[warp] = reach;
    }
    __syncthreads();
    const Word segments = __ballot_sync(kAllLanes, lane < kSegments && reached[lane]);

    for (int task = warp; task < PARTS * __popc(segments); task += WARPS) {
        const int segment = find_bit(segments, task / PARTS), part = task % PARTS;
        const int first = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - first;
        const int from = part * count / PARTS, to = (part + 1) * count / PARTS;
        const List list(values, deltas, (long long)(start + first) * kWarp + lane);
        Load stages[kStages];
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            if (from + stage < to) stages[stage] = list.get(from + stage);
        }
        int position = (own_bases[segment * kWarp] - begin) * kUnit;
#pragma unroll kSkippedLoads
        for (int at = 0; at < from; ++at) position = Positions<kUnit>(list.get_deltas(at)).end(position);
        for (int done = from; done < to; done += kStages) {
#pragma unroll
            for (int stage = 0; stage < kStages; ++stage) {
                if (done + stage >= to) break;
                const Load now = stages[stage];
                if (done + stage + kStages < to) stages[stage] = list.get(done + stage + kStages);
                scatter(now, shared + lane * sizeof(SCALAR), (end - begin) * kUnit, position);
            }
        }
    }
    __syncthreads();
    // Copies the rows first to first + count - 1 of the panel, neighbours in the weight: all of them, or each half.
    auto copy_rows = [&](int first, int count) {
        const int row = row_of(panel, first, n), stored = min(count, n - row);
        const int from = max(first * lane_columns, begin), past = min((first + stored) * lane_columns, end);
        uint4* to = weight + ((long long)row * lane_columns + from - first * lane_columns) * (kUnit / 16);
        const uint4* staged = reinterpret_cast<const uint4*>(shared) + (from - begin) * (kUnit / 16);
        for (int at = threadIdx.x; at < (past - from) * (kUnit / 16); at += kThreads) to[at] = staged[at];
    };
    const int first_half = first_half_rows(panel, n);
    if (PAIRED) copy_rows(0, first_half), copy_rows(first_half, first_half);
    else copy_rows(0, kPanelRows);
}
