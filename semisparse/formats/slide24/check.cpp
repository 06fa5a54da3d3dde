// Whether a slide24 weight in rows is sound: its positions, what lies past K, and that all is finite. check.py says where
// it is not.
//
// A byte of metadata holds four slots, wherever they stand in their groups. What it asks of the byte before it, and leaves
// to the one after it, is looked up.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Weight {
    const void* values;       // [rows, slots], of `bytes` each
    const uint8_t* metadata;  // [rows, slots / 4]
    int64_t rows, slots, window, columns;
    int64_t bytes;
    int64_t infinity;  // the least bits of a magnitude that is not finite; 0 where all are
};

// What a byte at one place of a group asks and leaves. A shift is the columns left out below a slot's; it never decreases
// in a group.
struct Octet {
    int8_t first = 3;  // shift of its first slot, which the slot before may not exceed; 3 where a group begins
    int8_t last = 0;   // shift of its last slot; 4, which none may be followed by, where the byte is not sound
};

constexpr int8_t kUnsound = 4;

Octet octet_of(int positions, int64_t slot, int64_t group_slots) {
    Octet octet;
    int before = 0;
    bool sound = true;
    for (int place = 0; place < 4; ++place) {
        const int64_t in_group = (slot + place) % group_slots;
        const int shift = (positions >> 2 * place & 3) - static_cast<int>(in_group % 2);
        if (in_group == 0) before = 0;
        else if (place == 0) octet.first = static_cast<int8_t>(shift);
        sound &= before <= shift && shift <= 2;
        before = shift;
    }
    octet.last = sound ? static_cast<int8_t>(before) : kUnsound;
    return octet;
}

// [places, 256], for the places in a group at which a byte may begin, in the order in which a row meets them.
std::vector<Octet> octets_of(int64_t group_slots) {
    std::vector<Octet> octets;
    int64_t slot = 0;
    do {
        for (int positions = 0; positions < 256; ++positions) octets.push_back(octet_of(positions, slot, group_slots));
        slot = (slot + 4) % group_slots;
    } while (slot != 0);
    return octets;
}

bool positions_sound(const uint8_t* metadata, int64_t count, const std::vector<Octet>& octets) {
    const int64_t places = static_cast<int64_t>(octets.size()) / 256;
    int last = 0, fault = 0;
    for (int64_t begin = 0; begin < count; begin += places) {
        const Octet* of_place = octets.data();
        const int64_t end = std::min(begin + places, count);
        for (int64_t at = begin; at < end; ++at, of_place += 256) {
            const Octet octet = of_place[metadata[at]];
            fault |= octet.first - last;  // negative where the order breaks
            last = octet.last;
        }
    }
    return fault >= 0 && last != kUnsound;
}

template <typename Bits>
bool row_sound(const Weight& weight, int64_t row) {
    const Bits* values = static_cast<const Bits*>(weight.values) + row * weight.slots;
    const uint8_t* metadata = weight.metadata + row * (weight.slots / 4);
    const Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    if (weight.infinity) {
        Bits most = 0;
        for (int64_t slot = 0; slot < weight.slots; ++slot) most = std::max<Bits>(most, values[slot] & magnitude);
        if (most >= static_cast<Bits>(weight.infinity)) return false;
    }
    const int64_t group_slots = weight.window - 2;
    // -0.0 is as good a filling as 0, but an int8 of -128 is a weight.
    const Bits weighs = weight.infinity ? magnitude : static_cast<Bits>(~Bits(0));
    for (int64_t slot = weight.columns / weight.window * group_slots; slot < weight.slots; ++slot) {
        const int64_t in_group = slot % group_slots;
        const int64_t shift = (metadata[slot / 4] >> slot % 4 * 2 & 3) - in_group % 2;
        if (slot + slot / group_slots * 2 + shift >= weight.columns && (values[slot] & weighs)) return false;
    }
    return true;
}

template <typename Bits>
bool sound(const Weight& weight, int threads) {
    const std::vector<Octet> octets = octets_of(weight.window - 2);
    const int64_t count = weight.slots / 4;
    int bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : bad)
    for (int64_t row = 0; row < weight.rows; ++row) {
        bad |= !positions_sound(weight.metadata + row * count, count, octets) || !row_sound<Bits>(weight, row);
    }
    return !bad;
}

}  // namespace

extern "C" bool slide24_sound(const Weight* weight, int threads) {
    if (weight->bytes == 1) return sound<uint8_t>(*weight, threads);
    if (weight->bytes == 2) return sound<uint16_t>(*weight, threads);
    return sound<uint32_t>(*weight, threads);
}
