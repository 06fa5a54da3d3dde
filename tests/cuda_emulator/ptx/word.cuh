// The register types that PTX instructions take.

#pragma once

using Word = unsigned int;              // .b32: packed values, and addresses in shared memory
using Long = unsigned long long;        // .b64: wgmma's matrix descriptors
