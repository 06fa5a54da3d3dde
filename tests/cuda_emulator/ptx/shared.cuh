// Stands in for ptx/shared.cuh. Addresses are offsets into the CTA's shared memory; range and alignment are checked.

#pragma once

#include "../machine.cuh"

inline Word smem_address(const void* pointer) {
    const ptrdiff_t at = static_cast<const char*>(pointer) - here->shared;
    if (at < 0 || at > static_cast<ptrdiff_t>(at < kSharedLimit ? shared_bytes : static_end())) fail("outside shared memory");
    return static_cast<Word>(at);
}

template <typename T> T shared_value(Word address) {
    T value;
    std::memcpy(&value, shared_at(address, sizeof value, sizeof value), sizeof value);
    return value;
}

template <int offset = 0> Word ld_shared(Word address) { return shared_value<Word>(address + offset); }
inline uint4 ld_shared_v4(Word address) { return shared_value<uint4>(address); }
inline void st_shared_v4(Word address, uint4 v) { std::memcpy(shared_at(address, 16, 16), &v, 16); }
inline void st_shared_v4(Word address, const Word (&words)[4]) { std::memcpy(shared_at(address, 16, 16), words, 16); }
inline void st_shared(Word address, Word value) { std::memcpy(shared_at(address, 4, 4), &value, 4); }
inline void st_shared_u16(Word address, unsigned short value) { std::memcpy(shared_at(address, 2, 2), &value, 2); }
inline void st_shared_u8(Word address, char value) { std::memcpy(shared_at(address, 1, 1), &value, 1); }
template <int count> void ld_shared_ordered(Word (&words)[count], Word address) {
    std::memcpy(words, shared_at(address, 4 * count, 4 * count), 4 * count);
}
inline Word ld_shared_ordered(Word address) { return shared_value<Word>(address); }
inline Word ld_shared_ordered_u16(Word address) { return shared_value<unsigned short>(address); }
inline Word ld_shared_ordered_u8(Word address) { return shared_value<unsigned char>(address); }
