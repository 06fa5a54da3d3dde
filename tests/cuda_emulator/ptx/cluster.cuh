// Stands in for ptx/cluster.cuh.

#pragma once

#include "../machine.cuh"

inline Word cluster_ctarank() { return here->rank; }
