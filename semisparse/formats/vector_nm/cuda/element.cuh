// Elements of kernels that only move data. Macro: BYTES, 2 or 4.

#pragma once

#include "ptx/word.cuh"

#if BYTES == 2
using Element = unsigned short;
#else
using Element = unsigned int;
#endif

constexpr int kThreads = 256;
