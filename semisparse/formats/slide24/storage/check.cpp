// Tests whether a slide24 weight in the layout on disk is valid: the columns of every group's slots increase, values at columns
// >= K are zeros, and all values are finite. If it is not, check.py locates the error.
//
// Time is linear in the stored bytes. Nothing is allocated, so no exception can arise.

#include <algorithm>
#include <cstdint>

namespace {

struct Weight {
    const void* values;       // [rows, slots], `width` bytes each
    const uint8_t* metadata;  // [rows, slots / 4]
    const uint8_t* begins;    // [slots / 4]: a Begins for each byte of a row
    // Slots per row; a group of `window` columns has window - 2 of them; `columns` is K.
    int64_t rows, slots, window, columns;
    int64_t width;     // bytes per value
    int64_t infinity;  // smallest bit pattern, sign bit cleared, that is not finite; 0 for int8, which has none
};

// The four slots of a byte of metadata. Slot s of a group holds its column s + shift, where the shift is the number of columns
// left out below it: 0 to 2. Columns increase exactly if shifts do not decrease inside a group.
struct Octet {
    int8_t first = 3;  // shift of the first slot, the maximum for the slot before it; 3, no limit, if a group begins there
    int8_t last = 0;   // shift of the last slot; or kUnsound, which exceeds any `first`
};

constexpr int8_t kUnsound = 4;

// Where groups begin inside a byte. A group has an even number of slots: at the first slot, the third, both or none.
enum Begins { kAtFirst = 1, kAtThird = 2 };

Octet octet_of(int positions, int begins) {
    Octet octet;
    int before = 0;
    bool sound = true;
    for (int i = 0; i < 4; ++i) {
        const int shift = (positions >> 2 * i & 3) - i % 2;
        if ((i == 0 && begins & kAtFirst) || (i == 2 && begins & kAtThird)) before = 0;
        else if (i == 0) octet.first = static_cast<int8_t>(shift);
        sound &= before <= shift && shift <= 2;
        before = shift;
    }
    octet.last = sound ? static_cast<int8_t>(before) : kUnsound;
    return octet;
}

struct Octets {
    Octet table[4][256];  // by Begins and byte
    Octets() {
        for (int begins = 0; begins < 4; ++begins)
            for (int positions = 0; positions < 256; ++positions) table[begins][positions] = octet_of(positions, begins);
    }
};

const Octets kOctets;

bool positions_sound(const uint8_t* metadata, const uint8_t* begins, int64_t count) {
    int last = 0, fault = 0;
    for (int64_t at = 0; at < count; ++at) {
        const Octet octet = kOctets.table[begins[at]][metadata[at]];
        fault |= octet.first - last;  // negative if the order breaks: sets the sign bit
        last = octet.last;
    }
    return fault >= 0 && last != kUnsound;
}

template <typename Bits>
bool values_sound(const Weight& weight, int64_t row) {
    const Bits* values = static_cast<const Bits*>(weight.values) + row * weight.slots;
    const uint8_t* metadata = weight.metadata + row * (weight.slots / 4);
    const Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    if (weight.infinity) {
        Bits largest = 0;
        for (int64_t slot = 0; slot < weight.slots; ++slot) largest = std::max<Bits>(largest, values[slot] & magnitude);
        if (largest >= static_cast<Bits>(weight.infinity)) return false;
    }
    const int64_t group_slots = weight.window - 2;
    // Past K, -0.0 counts as 0. An int8 of -128 has the same bits, but does not.
    const Bits non_zero = weight.infinity ? magnitude : static_cast<Bits>(~Bits(0));
    for (int64_t slot = weight.columns / weight.window * group_slots; slot < weight.slots; ++slot) {
        const int64_t shift = (metadata[slot / 4] >> slot % 4 * 2 & 3) - slot % 2;
        if (slot + slot / group_slots * 2 + shift >= weight.columns && (values[slot] & non_zero)) return false;
    }
    return true;
}

template <typename Bits>
bool sound(const Weight& weight, int threads) {
    const int64_t count = weight.slots / 4;
    int bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : bad)
    for (int64_t row = 0; row < weight.rows; ++row) {
        bad |= !positions_sound(weight.metadata + row * count, weight.begins, count) || !values_sound<Bits>(weight, row);
    }
    return !bad;
}

}  // namespace

extern "C" bool slide24_sound(const Weight* weight, int threads) noexcept {
    if (weight->width == 1) return sound<uint8_t>(*weight, threads);
    if (weight->width == 2) return sound<uint16_t>(*weight, threads);
    return sound<uint32_t>(*weight, threads);
}
