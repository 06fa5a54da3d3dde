// Stands in for the shared waiting.cuh.

#pragma once

#include "warpgroups.cuh"

namespace barrier {

inline void wait(Word at, Word parity) {
    while (!failure && (counting_barriers.at(at).phase & 1) == parity) pause_fiber();
}

}  // namespace barrier
