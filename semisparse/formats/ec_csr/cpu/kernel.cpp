// Row panels of ec_csr on a CPU: matmul, unpacking, and the check of a file's lists. The layout is `Row panels` in README.md.
//
// All walk a panel's lists in the order of their bytes. A panel is one thread's work and its accumulators are float32 in that
// order, so the number of threads changes no bit. Only the check of a file allocates memory: 8 bytes per stored value at most.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "scalars.hpp"

namespace {

constexpr int kLanes = 32, kSegments = 16, kRowMultiple = 2, kMaxRows = 64, kPassTokens = 8;
constexpr int64_t kMaxColumns = int64_t{1} << 29;

// The exported functions' results. The caller raises an error for all but kDone.
enum Status { kDone, kBadSizes, kNoMemory };

struct Weight {
    const void* values;
    const uint8_t* deltas;
    const void* bases;           // [panels * 16, 32] uint16, or uint32 if `wide`
    const int32_t* panel_loads;  // [panels + 1]
    int64_t n, k, panel_rows, panels, bits, wide;
    int64_t type;                // 0 float32, 1 float16, 2 bfloat16

    // Whether positions fit an int and a panel's rows fit the accumulators. All code below relies on this.
    bool has_good_sizes() const {
        return n > 0 && k > 0 && k <= kMaxColumns && panel_rows > 0 && panel_rows <= kMaxRows &&
               panels == (n + panel_rows - 1) / panel_rows;
    }
};

// A position of a list: a row of the panel, and the lane's columns before it in that row.
struct Position {
    int row, column;
};

// The lists of a panel.
template <typename Type, int bits>
struct Lists {
    using Stored = typename Type::Stored;
    static constexpr int kVector = 16 / sizeof(Stored);
    const Weight& weight;
    const int64_t panel, loads;
    const Stored* values;
    const uint8_t* deltas;
    const int lane_columns;

    Lists(const Weight& of, int64_t number)
        : weight(of), panel(number), loads(of.panel_loads[number + 1] - of.panel_loads[number]),
          values(static_cast<const Stored*>(of.values) + of.panel_loads[number] * int64_t{kLanes * kVector}),
          deltas(of.deltas + of.panel_loads[number] * int64_t{kLanes * kVector * bits / 8}),
          lane_columns(static_cast<int>((of.k + kLanes - 1) / kLanes)) {}

    int64_t first_load(int segment) const { return segment * loads / kSegments; }
    static int64_t at(int64_t load, int lane) { return (load * kLanes + lane) * kVector; }
    Stored value(int64_t load, int lane, int i) const { return values[at(load, lane) + i]; }
    int delta(int64_t load, int lane, int i) const {
        const int64_t first = at(load, lane);
        return bits == 8 ? deltas[first + i] : deltas[first / 2 + i / 2] >> i % 2 * 4 & 15;
    }

    // The position at which each lane begins a segment.
    void begin(int segment, Position* positions) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t index = (panel * kSegments + segment) * kLanes + lane;
            const uint32_t base = weight.wide ? static_cast<const uint32_t*>(weight.bases)[index]
                                              : static_cast<const uint16_t*>(weight.bases)[index];
            positions[lane] = {static_cast<int>(base / lane_columns), static_cast<int>(base % lane_columns)};
        }
    }
};

// Calls visit(lane, position, rows crossed, load, entry of the load, stored value) for every entry of a panel. A faulty list
// may cross any number of rows: rows from kMaxRows on are all given as kMaxRows.
template <typename Type, int bits, typename Visit>
void walk(const Weight& weight, int64_t panel, Visit visit) {
    const Lists<Type, bits> lists(weight, panel);
    for (int segment = 0; segment < kSegments; ++segment) {
        Position positions[kLanes];
        lists.begin(segment, positions);
        for (int64_t load = lists.first_load(segment); load < lists.first_load(segment + 1); ++load) {
            for (int lane = 0; lane < kLanes; ++lane) {
                Position at = positions[lane];
                for (int i = 0; i < lists.kVector; ++i) {
                    int crossed = 0;
                    at.column += lists.delta(load, lane, i);
                    for (; at.column >= lists.lane_columns; at.column -= lists.lane_columns) ++crossed;
                    at.row = std::min(at.row + crossed, kMaxRows);
                    visit(lane, at, crossed, load, i, lists.value(load, lane, i));
                }
                positions[lane] = at;
            }
        }
    }
}

// x is [lanes, lane columns, tokens], y [tokens, n]. As `walk`, but the end of a row is tested at every second entry only.
// Aligned, because the loops' offset in a cache line changes the time: 25 ms instead of 32 at one token, 23 instead of 29 at 8
// (2048 x 4096).
template <typename Type, int bits, int tokens>
__attribute__((aligned(64))) void multiply_panel(const Weight& weight, int64_t panel, const float* x, float* y) {
    const Lists<Type, bits> lists(weight, panel);
    const int lane_columns = lists.lane_columns;
    float sums[kMaxRows][tokens] = {};
    for (int segment = 0; segment < kSegments; ++segment) {
        Position positions[kLanes];
        lists.begin(segment, positions);
        for (int64_t load = lists.first_load(segment); load < lists.first_load(segment + 1); ++load) {
            for (int lane = 0; lane < kLanes; ++lane) {
                int column = positions[lane].column, row = positions[lane].row;
                const float* inputs = x + static_cast<int64_t>(lane) * lane_columns * tokens;
                float sum[tokens] = {};
                for (int i = 0; i < lists.kVector; ++i) {
                    column += lists.delta(load, lane, i);
                    if (i % kRowMultiple == 0 && column >= lane_columns) {
                        for (int token = 0; token < tokens; ++token) sums[row][token] += sum[token], sum[token] = 0;
                        column -= lane_columns, ++row;
                    }
                    const float value = Type::widen(lists.value(load, lane, i));
                    for (int token = 0; token < tokens; ++token) sum[token] += value * inputs[column * tokens + token];
                }
                for (int token = 0; token < tokens; ++token) sums[row][token] += sum[token];
                positions[lane] = {row, column};
            }
        }
    }
    const int64_t first = panel * weight.panel_rows, rows = std::min(weight.panel_rows, weight.n - first);
    for (int64_t row = 0; row < rows; ++row)
        for (int token = 0; token < tokens; ++token) y[token * weight.n + first + row] = sums[row][token];
}

enum Fault { kNone, kLeavesPanel, kEndsRow, kSkipsRow, kPastK, kPastN, kTwice, kGoesBack };

struct Finding {
    int64_t fault, panel, lane;
};

// Where the lists of all lanes are: columns of the row, and positions; each lane's last weight; whether it has a fault.
struct State {
    int columns[kLanes], positions[kLanes], last[kLanes], faults[kLanes];
};

// Advances every lane by one entry. The entry's delta is the lowest bits of `deltas`; it is a weight if the lowest bit of
// `weights` is set. Lane l has `ends[l]` columns. The arrays do not overlap (__restrict), so g++ vectorises over the lanes: 5
// ms instead of 41 for a layer of 8192 x 2048.
template <int bits>
void take_entry(uint32_t* __restrict deltas, uint32_t* __restrict weights, const int* __restrict ends, int lane_columns,
                int may_cross, int* __restrict columns, int* __restrict positions, int* __restrict last,
                int* __restrict faults) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const int delta = deltas[lane] & ((1u << bits) - 1), weight = weights[lane] & 1u;
        deltas[lane] >>= bits;
        weights[lane] >>= 8;
        const int passed = columns[lane] + delta, position = positions[lane] + delta;
        const int column = passed >= lane_columns ? passed - lane_columns : passed;
        const int strays = (column >= lane_columns) | (passed >= lane_columns && !may_cross);
        const int wrong = (column >= ends[lane]) | (position <= last[lane]);
        faults[lane] |= strays | (weight & wrong);
        columns[lane] = column;
        positions[lane] = position;
        last[lane] = weight ? position : last[lane];
    }
}

// Walks a segment, all lanes at once, and returns whether kernels can read every entry.
template <typename Type, int bits>
bool sound_segment(const Lists<Type, bits>& lists, int segment, const int* ends, State& state) {
    constexpr int kVector = Lists<Type, bits>::kVector, kTogether = 4;
    for (int64_t load = lists.first_load(segment); load < lists.first_load(segment + 1); ++load) {
        const auto* values = lists.values + lists.at(load, 0);
        uint8_t stored[kLanes * kVector];
        for (int i = 0; i < kLanes * kVector; ++i) stored[i] = static_cast<typename Type::Stored>(values[i] << 1) != 0;
        for (int first = 0; first < kVector; first += kTogether) {
            uint32_t weights[kLanes], deltas[kLanes] = {};
            for (int lane = 0; lane < kLanes; ++lane) {
                std::memcpy(&weights[lane], stored + lane * kVector + first, kTogether);
                std::memcpy(&deltas[lane], lists.deltas + (lists.at(load, lane) + first) * bits / 8, kTogether * bits / 8);
            }
            for (int i = 0; i < kTogether; ++i)
                take_entry<bits>(deltas, weights, ends, lists.lane_columns, i % kRowMultiple == 0, state.columns,
                                 state.positions, state.last, state.faults);
        }
    }
    return std::count(state.faults, state.faults + kLanes, 0) == kLanes;
}

// Returns true if a panel's lists are certainly valid; otherwise `check_panel` decides. It requires ascending
// positions, so that no weight is stored twice.
template <typename Type, int bits>
bool sound_panel(const Weight& weight, int64_t panel, int& span) {
    const Lists<Type, bits> lists(weight, panel);
    const int64_t rows = std::min(weight.panel_rows, weight.n - panel * weight.panel_rows);
    // Positions are 32 bits here, and a faulty list may pass over any number of rows.
    const int64_t farthest = weight.panel_rows * lists.lane_columns + lists.loads * lists.kVector * ((1 << bits) - 1);
    if (farthest > std::numeric_limits<int>::max()) return false;
    int ends[kLanes];
    State state = {};
    for (int lane = 0; lane < kLanes; ++lane)
        ends[lane] = static_cast<int>((weight.k - lane + kLanes - 1) / kLanes), state.last[lane] = -1;
    for (int segment = 0; segment < kSegments; ++segment) {
        if (lists.first_load(segment) == lists.first_load(segment + 1)) continue;
        Position begins[kLanes];
        lists.begin(segment, begins);
        for (int lane = 0; lane < kLanes; ++lane) {
            state.columns[lane] = begins[lane].column;
            state.positions[lane] = begins[lane].row * lists.lane_columns + begins[lane].column;
            if (state.positions[lane] && state.positions[lane] < state.last[lane]) return false;
        }
        if (!sound_segment(lists, segment, ends, state)) return false;
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = (state.positions[lane] - state.columns[lane]) / lists.lane_columns;
            if (row >= rows) return false;
            span = std::max(span, 1 + row - begins[lane].row);
        }
    }
    return true;
}

// Returns the panel's first fault; kTwice only if there is no other. `span` becomes the most rows that a segment of a list
// covers. It allocates memory in proportion to the stored values.
template <typename Type, int bits>
Finding check_panel(const Weight& weight, int64_t panel, int& span) {
    const Lists<Type, bits> lists(weight, panel);
    const int64_t first = panel * weight.panel_rows, columns = int64_t{lists.lane_columns} * kLanes;
    std::vector<int64_t> weights;  // row of the panel * columns + column
    weights.reserve(lists.loads * kLanes * lists.kVector);
    int begin_rows[kLanes] = {}, last[kLanes] = {};
    Finding finding = {kNone, panel, 0};
    walk<Type, bits>(weight, panel, [&](int lane, Position at, int crossed, int64_t load, int i, auto stored) {
        if (finding.fault) return;
        const int position = at.row * lists.lane_columns + at.column, column = at.column * kLanes + lane;
        bool back = false;
        if (i == 0 && load == lists.first_load(((load + 1) * kSegments - 1) / lists.loads)) {
            begin_rows[lane] = at.row - crossed;
            const int base = position - lists.delta(load, lane, i);
            back = base && base < last[lane];
        }
        const bool is_weight = Type::widen(stored) != 0;
        const int fault = at.row >= weight.panel_rows         ? kLeavesPanel
                          : back                              ? kGoesBack
                          : i % kRowMultiple != 0 && crossed  ? kEndsRow
                          : crossed > 1                       ? kSkipsRow
                          : is_weight && column >= weight.k   ? kPastK
                          : first + at.row >= weight.n        ? kPastN
                                                              : kNone;
        if (fault) finding = {fault, panel, lane};
        if (is_weight) weights.push_back(at.row * columns + column), last[lane] = std::max(last[lane], position);
        span = std::max(span, 1 + at.row - begin_rows[lane]);
    });
    std::sort(weights.begin(), weights.end());
    const auto twice = std::adjacent_find(weights.begin(), weights.end());
    if (!finding.fault && twice != weights.end()) finding = {kTwice, panel, *twice % kLanes};
    return finding;
}

template <typename Type, int bits>
Status check(const Weight& weight, Finding& finding, int& span, int threads) {
    Status status = kDone;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        int met = 1;
        Finding own = {kNone, panel, 0};
        bool failed = false;
        try {
            if (!sound_panel<Type, bits>(weight, panel, met)) own = check_panel<Type, bits>(weight, panel, met);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
#pragma omp critical
        {
            if (failed) status = kNoMemory;
            if (own.fault && panel < finding.panel) finding = own;
            span = std::max(span, met);
        }
    }
    return status;
}

template <typename Type, int bits>
void multiply(const Weight& weight, const float* x, float* y, int tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        if (tokens == 1) multiply_panel<Type, bits, 1>(weight, panel, x, y);
        else multiply_panel<Type, bits, kPassTokens>(weight, panel, x, y);
    }
}

template <typename Type, int bits>
void unpack(const Weight& weight, typename Type::Stored* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        typename Type::Stored* rows = to + panel * weight.panel_rows * weight.k;
        walk<Type, bits>(weight, panel, [&](int lane, Position at, int, int64_t, int, auto value) {
            if (value) rows[at.row * weight.k + int64_t{at.column} * kLanes + lane] = value;
        });
    }
}

// Calls use(type, bits) with the type of the weight's values and the bits per delta; returns kBadSizes if has_good_sizes fails.
template <typename Use>
int with_types(const Weight& weight, Use use) {
    if (!weight.has_good_sizes()) return kBadSizes;
    return with_type(weight.type, [&](auto type) {
        if (weight.bits == 4) return use(type, std::integral_constant<int, 4>());
        return use(type, std::integral_constant<int, 8>());
    });
}

}  // namespace

// Multiplies x, [32, ceil(K / 32), tokens], by the weight: tokens 1 or 8, zeros past K, lane l has the columns l, l + 32, ...
// Writes y, [tokens, N].
extern "C" int ec_csr_matmul(const Weight* weight, const float* x, float* y, int tokens, int threads) {
    return with_types(*weight, [&](auto type, auto bits) {
        multiply<decltype(type), bits>(*weight, x, y, tokens, threads);
        return kDone;
    });
}

// Writes the weights into `to`, [N, K] zeros.
extern "C" int ec_csr_unpack(const Weight* weight, void* to, int threads) {
    return with_types(*weight, [&](auto type, auto bits) {
        using Type = decltype(type);
        unpack<Type, bits>(*weight, static_cast<typename Type::Stored*>(to), threads);
        return kDone;
    });
}

// Checks every list, given offsets that stay inside `values` and bases inside a panel. `result` becomes {fault, panel, lane,
// span}.
extern "C" int ec_csr_check(const Weight* weight, int64_t* result, int threads) {
    return with_types(*weight, [&](auto type, auto bits) {
        Finding finding = {kNone, weight->panels, 0};
        int span = 1;
        const Status status = check<decltype(type), bits>(*weight, finding, span, threads);
        result[0] = finding.fault, result[1] = finding.panel, result[2] = finding.lane, result[3] = span;
        return status;
    });
}
