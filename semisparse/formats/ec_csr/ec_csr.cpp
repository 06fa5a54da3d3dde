// The layout `banks` of ec_csr on a CPU: its product, the weight given back, and the check of a file's lists. README.md tells
// the bytes.
//
// All walk a panel's lists in the order of their bytes. A panel is one thread's, and its sums are float32 in that order, so
// the number of threads changes no bit.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "scalars.hpp"

namespace {

constexpr int kLanes = 32, kSegments = 16, kRun = 2, kMostRows = 64, kMostTokens = 8;

struct Weight {
    const void* values;
    const uint8_t* deltas;
    const void* bases;           // [panels * 16, 32] uint16, or uint32 if `wide`
    const int32_t* panel_loads;  // [panels + 1]
    int64_t n, k, panel_rows, panels, bits, wide;
    int64_t type;                // 0 float32, 1 float16, 2 bfloat16
};

// Where a list stands: in its panel's row `row`, at the `rest`-th of the lane's columns.
struct Place {
    int row, rest;
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
    const int height;

    Lists(const Weight& of, int64_t number)
        : weight(of), panel(number), loads(of.panel_loads[number + 1] - of.panel_loads[number]),
          values(static_cast<const Stored*>(of.values) + of.panel_loads[number] * int64_t{kLanes * kVector}),
          deltas(of.deltas + of.panel_loads[number] * int64_t{kLanes * kVector * bits / 8}),
          height(static_cast<int>((of.k + kLanes - 1) / kLanes)) {}

    int64_t first_load(int segment) const { return segment * loads / kSegments; }
    static int64_t at(int64_t load, int lane) { return (load * kLanes + lane) * kVector; }
    Stored value(int64_t load, int lane, int i) const { return values[at(load, lane) + i]; }
    int delta(int64_t load, int lane, int i) const {
        const int64_t first = at(load, lane);
        return bits == 8 ? deltas[first + i] : deltas[first / 2 + i / 2] >> i % 2 * 4 & 15;
    }

    void begin(int segment, Place* places) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t index = (panel * kSegments + segment) * kLanes + lane;
            const uint32_t base = weight.wide ? static_cast<const uint32_t*>(weight.bases)[index]
                                              : static_cast<const uint16_t*>(weight.bases)[index];
            places[lane] = {static_cast<int>(base / height), static_cast<int>(base % height)};
        }
    }
};

// Calls step(lane, place, rows crossed, load, number in the load, stored value) for every step of a panel.
template <typename Type, int bits, typename Step>
void walk(const Weight& weight, int64_t panel, Step step) {
    const Lists<Type, bits> lists(weight, panel);
    for (int segment = 0; segment < kSegments; ++segment) {
        Place places[kLanes];
        lists.begin(segment, places);
        for (int64_t load = lists.first_load(segment); load < lists.first_load(segment + 1); ++load) {
            for (int lane = 0; lane < kLanes; ++lane) {
                Place place = places[lane];
                for (int i = 0; i < lists.kVector; ++i) {
                    int crossed = 0;
                    for (place.rest += lists.delta(load, lane, i); place.rest >= lists.height; place.rest -= lists.height)
                        ++crossed;
                    place.row += crossed;
                    step(lane, place, crossed, load, i, lists.value(load, lane, i));
                }
                places[lane] = place;
            }
        }
    }
}

// x is [lanes, height, tokens], y [tokens, n]. What `walk` does, with a row's end looked for at every second step only.
template <typename Type, int bits, int tokens>
void multiply_panel(const Weight& weight, int64_t panel, const float* x, float* y) {
    const Lists<Type, bits> lists(weight, panel);
    const int height = lists.height;
    float sums[kMostRows][tokens] = {};
    for (int segment = 0; segment < kSegments; ++segment) {
        Place places[kLanes];
        lists.begin(segment, places);
        for (int64_t load = lists.first_load(segment); load < lists.first_load(segment + 1); ++load) {
            for (int lane = 0; lane < kLanes; ++lane) {
                int rest = places[lane].rest, row = places[lane].row;
                const float* inputs = x + static_cast<int64_t>(lane) * height * tokens;
                float sum[tokens] = {};
                for (int i = 0; i < lists.kVector; ++i) {
                    rest += lists.delta(load, lane, i);
                    if (i % kRun == 0 && rest >= height) {
                        for (int token = 0; token < tokens; ++token) sums[row][token] += sum[token], sum[token] = 0;
                        rest -= height, ++row;
                    }
                    const float value = Type::widen(lists.value(load, lane, i));
                    for (int token = 0; token < tokens; ++token) sum[token] += value * inputs[rest * tokens + token];
                }
                for (int token = 0; token < tokens; ++token) sums[row][token] += sum[token];
                places[lane] = {row, rest};
            }
        }
    }
    const int64_t first = panel * weight.panel_rows, rows = std::min(weight.panel_rows, weight.n - first);
    for (int64_t row = 0; row < rows; ++row)
        for (int token = 0; token < tokens; ++token) y[token * weight.n + first + row] = sums[row][token];
}

enum Fault { kNone, kLeaves, kEndsRow, kPassesRow, kPastK, kPastN, kTwice, kGoesBack };

struct Finding {
    int64_t fault, panel, lane;
};

// Where the lists of all lanes stand: as columns of the row, and as places; and each lane's last weight so far.
struct Stand {
    int rests[kLanes], numbers[kLanes], last[kLanes], faults[kLanes];
};

// Goes one step in every lane: by the lowest bits of `deltas`, to a weight if the lowest bit of `weights` is set. A lane has
// `ends` columns. No array overlaps another.
template <int bits>
void step_all(uint32_t* __restrict deltas, uint32_t* __restrict weights, const int* __restrict ends, int height,
              int may_cross, int* __restrict rests, int* __restrict numbers, int* __restrict last,
              int* __restrict faults) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const int delta = deltas[lane] & ((1u << bits) - 1), weight = weights[lane] & 1u;
        deltas[lane] >>= bits;
        weights[lane] >>= 8;
        const int passed = rests[lane] + delta, number = numbers[lane] + delta;
        const int rest = passed >= height ? passed - height : passed;
        const int strays = (rest >= height) | (passed >= height && !may_cross);
        const int wrong = (rest >= ends[lane]) | (number <= last[lane]);
        faults[lane] |= strays | (weight & wrong);
        rests[lane] = rest;
        numbers[lane] = number;
        last[lane] = weight ? number : last[lane];
    }
}

// Walks a segment, all lanes at once, and says whether every step is as kernels want it.
template <typename Type, int bits>
bool sound_segment(const Lists<Type, bits>& lists, int segment, const int* ends, Stand& at) {
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
                step_all<bits>(deltas, weights, ends, lists.height, i % kRun == 0, at.rests, at.numbers, at.last, at.faults);
        }
    }
    return std::count(at.faults, at.faults + kLanes, 0) == kLanes;
}

// Says whether a panel's lists are in order beyond doubt; if not, `check_panel` has to look. Weights that follow one another
// upwards stand once each.
template <typename Type, int bits>
bool sound_panel(const Weight& weight, int64_t panel, int& span) {
    const Lists<Type, bits> lists(weight, panel);
    const int64_t rows = std::min(weight.panel_rows, weight.n - panel * weight.panel_rows);
    int ends[kLanes];
    Stand stand = {};
    for (int lane = 0; lane < kLanes; ++lane)
        ends[lane] = static_cast<int>((weight.k - lane + kLanes - 1) / kLanes), stand.last[lane] = -1;
    for (int segment = 0; segment < kSegments; ++segment) {
        if (lists.first_load(segment) == lists.first_load(segment + 1)) continue;
        Place places[kLanes];
        lists.begin(segment, places);
        for (int lane = 0; lane < kLanes; ++lane) {
            stand.rests[lane] = places[lane].rest;
            stand.numbers[lane] = places[lane].row * lists.height + places[lane].rest;
            if (stand.numbers[lane] && stand.numbers[lane] < stand.last[lane]) return false;
        }
        if (!sound_segment(lists, segment, ends, stand)) return false;
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = (stand.numbers[lane] - stand.rests[lane]) / lists.height;
            if (row >= rows) return false;
            span = std::max(span, 1 + row - places[lane].row);
        }
    }
    return true;
}

// Gives the panel's first fault, and in `span` the most rows that a lane meets in a segment.
template <typename Type, int bits>
Finding check_panel(const Weight& weight, int64_t panel, int& span) {
    const Lists<Type, bits> lists(weight, panel);
    const int64_t first = panel * weight.panel_rows, columns = int64_t{lists.height} * kLanes;
    std::vector<bool> seen(weight.panel_rows * columns);
    int base_rows[kLanes] = {}, last[kLanes] = {};
    Finding finding = {kNone, panel, 0};
    walk<Type, bits>(weight, panel, [&](int lane, Place place, int crossed, int64_t load, int i, auto stored) {
        if (finding.fault) return;
        bool back = false;
        if (i == 0 && load == lists.first_load(((load + 1) * kSegments - 1) / lists.loads)) {
            base_rows[lane] = place.row - crossed;
            const int base = place.row * lists.height + place.rest - lists.delta(load, lane, i);
            back = base && base < last[lane];
        }
        const int64_t column = int64_t{place.rest} * kLanes + lane, number = place.row * columns + column;
        const bool is_weight = Type::widen(stored) != 0;
        const int fault = place.row >= weight.panel_rows      ? kLeaves
                          : back                              ? kGoesBack
                          : i % kRun != 0 && crossed          ? kEndsRow
                          : crossed > 1                       ? kPassesRow
                          : is_weight && column >= weight.k   ? kPastK
                          : first + place.row >= weight.n     ? kPastN
                          : is_weight && seen[number]         ? kTwice
                                                              : kNone;
        if (fault) {
            finding = {fault, panel, lane};
            return;
        }
        if (is_weight) seen[number] = true, last[lane] = std::max(last[lane], place.row * lists.height + place.rest);
        span = std::max(span, 1 + place.row - base_rows[lane]);
    });
    return finding;
}

template <typename Type, int bits>
Finding check(const Weight& weight, int& span, int threads) {
    Finding finding = {kNone, weight.panels, 0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        int met = 1;
        const bool sound = sound_panel<Type, bits>(weight, panel, met);
        const Finding found = sound ? Finding{kNone, panel, 0} : check_panel<Type, bits>(weight, panel, met);
#pragma omp critical
        {
            if (found.fault && panel < finding.panel) finding = found;
            span = std::max(span, met);
        }
    }
    return finding;
}

template <typename Type, int bits>
void multiply(const Weight& weight, const float* x, float* y, int tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        if (tokens == 1) multiply_panel<Type, bits, 1>(weight, panel, x, y);
        else multiply_panel<Type, bits, kMostTokens>(weight, panel, x, y);
    }
}

template <typename Type, int bits>
void unpack(const Weight& weight, typename Type::Stored* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
        typename Type::Stored* rows = to + panel * weight.panel_rows * weight.k;
        walk<Type, bits>(weight, panel, [&](int lane, Place place, int, int64_t, int, auto value) {
            if (value) rows[place.row * weight.k + place.rest * kLanes + lane] = value;
        });
    }
}

template <typename Type, typename Call>
void with_bits(const Weight& weight, Call call) {
    if (weight.bits == 4) call(Type(), std::integral_constant<int, 4>());
    else call(Type(), std::integral_constant<int, 8>());
}

template <typename Call>
void with_types(const Weight& weight, Call call) {
    with_type(weight.type, [&](auto type) { with_bits<decltype(type)>(weight, call); });
}

}  // namespace

// x is [32, ceil(K / 32), tokens], tokens 1 or 8, zeros past K: lane l has the columns l, l + 32, ...; y is [tokens, N].
extern "C" void ec_csr_product(const Weight* weight, const float* x, float* y, int tokens, int threads) {
    with_types(*weight, [&](auto type, auto bits) { multiply<decltype(type), bits>(*weight, x, y, tokens, threads); });
}

// Writes the weights into `to`, [N, K] zeros.
extern "C" void ec_csr_unpack(const Weight* weight, void* to, int threads) {
    with_types(*weight, [&](auto type, auto bits) {
        using Type = decltype(type);
        unpack<Type, bits>(*weight, static_cast<typename Type::Stored*>(to), threads);
    });
}

// Checks every list, given offsets that stay inside `values`; `found` is {fault, panel, lane, span}.
extern "C" void ec_csr_check(const Weight* weight, int64_t* found, int threads) {
    with_types(*weight, [&](auto type, auto bits) {
        int span = 1;
        const Finding finding = check<decltype(type), bits>(*weight, span, threads);
        found[0] = finding.fault, found[1] = finding.panel, found[2] = finding.lane, found[3] = span;
    });
}
