// Stands in for ptx/integer.cuh.

#pragma once

#include "../machine.cuh"

inline Word prmt(Word low, Word high, Word selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    Word d = 0;
    for (int i = 0; i < 4; ++i) {
        const Word nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 255;
        d |= (nibble & 8 ? byte & 128 ? 255u : 0u : byte) << 8 * i;
    }
    return d;
}

inline Word mad_lo(Word a, Word b, Word c) { return a * b + c; }
inline const char* mad_wide(Word a, Word b, const char* pointer) { return pointer + size_t(a) * b; }
inline Word opaque(Word value) { return value; }
inline bool elect_sync() { return threadIdx.x % 32 == 0; }
