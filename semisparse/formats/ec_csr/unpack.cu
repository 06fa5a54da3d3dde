// weight[n, k] from an ec_csr weight in the layout `banks`, rows padded with zeros to whole lanes: ceil(k / 32) * 32 columns.
//
// A thread block makes a tile, some places of a panel in a row: 32 columns of a row are neighbours in memory and share a
// place. It writes zeros to shared memory, scatters there what the segments that reach into the tile hold, each cut into
// PARTS for a warp each, and copies the tile out in whole lines.
//
// Compiled for SCALAR (an unsigned integer of the weight's size), DELTA_BITS (4 or 8), INDEX (unsigned short or unsigned
// int, of bases), PANEL_ROWS (at most 64), PARTS, WARPS (16 at least) and BLOCKS (that shall fit a processor).

#include "ptx/griddepcontrol.cuh"
#include "lists.cuh"

constexpr int kPanelRows = PANEL_ROWS;
constexpr int kThreads = WARPS * kWarp;
constexpr int kUnit = kWarp * sizeof(SCALAR);  // bytes of a place
constexpr int kAhead = 2;                      // loads under way while one is used
constexpr int kLoadsOfSum = 4;                 // deltas under way while a part's first place is looked for

// Whether a segment that begins here in this lane, and the next one there, may reach into the places from `begin` to `end`.
// A lane's segment without steps begins with 0.
__device__ __forceinline__ bool reaches(Word base, Word next, Word begin, Word end) {
    return __any_sync(kAllLanes, base < end) && __any_sync(kAllLanes, next >= begin || next == 0);
}

// The number of the `index`-th bit that is set.
__device__ __forceinline__ int bit_of(Word bits, int index) {
    const int lane = threadIdx.x % kWarp;
    const bool mine = bits >> lane & 1 && __popc(bits & ((1u << lane) - 1)) == index;
    return __ffs(__ballot_sync(kAllLanes, mine)) - 1;
}

// Writes the weights of a load that lie inside the tile; `place` is in bytes from its beginning.
__device__ __forceinline__ void scatter(const Load& load, char* lane_tile, Word size, int& place) {
    const Places<kUnit> places(load.deltas);
#pragma unroll
    for (int step = 0; step < kVector; ++step) {
        const int at = places.after(place, step);
        if (places.starts_anew(step)) place = at;
        const Word word = load.word(step);
        const SCALAR value = sizeof(SCALAR) == 2 && step % 2 ? word >> 16 : word;
        // A zero of either sign is padding.
        if (static_cast<Word>(at) < size && static_cast<SCALAR>(value << 1)) *reinterpret_cast<SCALAR*>(lane_tile + at) = value;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) semisparse_ec_csr_unpack(
    const uint4* values,     // [loads, 32], kVector values each
    const void* deltas,      // [loads, 32], kVector deltas each
    const INDEX* bases,      // [panels, segments, 32]
    const int* panel_loads,  // [panels + 1]
    uint4* weight,           // [n, height, 32]
    int n, int height, int tiles, int tile_places  // height: places of a row; tiles: of a panel
) {
    extern __shared__ __align__(16) char shared[];  // the tile; which segments reach into it
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int panel = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int begin = tile * tile_places, end = min(begin + tile_places, kPanelRows * height);
    Word* reached = reinterpret_cast<Word*>(shared + tile_places * kUnit);

    for (int at = threadIdx.x; at < tile_places * (kUnit / 16); at += kThreads) reinterpret_cast<uint4*>(shared)[at] = uint4{};
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int start = panel_loads[panel], loads = panel_loads[panel + 1] - start;
    const INDEX* own_bases = bases + panel * kSegments * kWarp + lane;
    if (warp < kSegments) {
        const Word next = warp + 1 < kSegments ? own_bases[(warp + 1) * kWarp] : 0;
        const bool found = reaches(own_bases[warp * kWarp], next, begin, end);
        if (lane == 0) reached[warp] = found;
    }
    __syncthreads();
    const Word segments = __ballot_sync(kAllLanes, lane < kSegments && reached[lane]);

    for (int task = warp; task < PARTS * __popc(segments); task += WARPS) {
        const int segment = bit_of(segments, task / PARTS), part = task % PARTS;
        const int first = segment * loads / kSegments, count = (segment + 1) * loads / kSegments - first;
        const int from = part * count / PARTS, to = (part + 1) * count / PARTS;
        const List list(values, deltas, (long long)(start + first) * kWarp + lane);
        Load ring[kAhead];
#pragma unroll
        for (int at = 0; at < kAhead; ++at) {
            if (from + at < to) ring[at] = list.get(from + at);
        }
        int place = (own_bases[segment * kWarp] - begin) * kUnit;
#pragma unroll kLoadsOfSum
        for (int at = 0; at < from; ++at) place = Places<kUnit>(list.get_deltas(at)).end(place);
        for (int done = from; done < to; done += kAhead) {
#pragma unroll
            for (int at = 0; at < kAhead; ++at) {
                if (done + at >= to) break;
                const Load now = ring[at];
                if (done + at + kAhead < to) ring[at] = list.get(done + at + kAhead);
                scatter(now, shared + lane * sizeof(SCALAR), (end - begin) * kUnit, place);
            }
        }
    }
    __syncthreads();
    const int row_places = n * height - panel * kPanelRows * height;  // from the panel's first to the weight's last
    uint4* to = weight + ((long long)panel * kPanelRows * height + begin) * (kUnit / 16);
    for (int at = threadIdx.x; at < (min(end, row_places) - begin) * (kUnit / 16); at += kThreads) {
        to[at] = reinterpret_cast<const uint4*>(shared)[at];
    }
}
