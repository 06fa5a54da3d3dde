// Waiting for a barrier in shared memory, in a loop of the assembler's. slide24 keeps a loop of the compiler's: with the other one
// either's kernels become other code than what was measured (LOG.md).

#pragma once

#include "word.cuh"

namespace barrier {

__device__ __forceinline__ void wait(Word at, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        : : "r"(at), "r"(parity) : "memory");
}

}  // namespace barrier
