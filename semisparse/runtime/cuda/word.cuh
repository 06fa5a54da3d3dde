// The 32 bits in which registers hold packed values, and addresses in shared memory.

#pragma once

using Word = unsigned int;
