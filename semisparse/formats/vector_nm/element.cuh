// What kernels that only move numbers know of them: BYTES, 2 or 4.

#pragma once

#include "ptx/word.cuh"

#if BYTES == 2
using Element = unsigned short;
#else
using Element = unsigned int;
#endif

constexpr int kThreads = 256;
