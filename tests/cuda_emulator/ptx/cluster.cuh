// Stands in for ptx/cluster.cuh.

#pragma once

#include "../machine.cuh"

inline Word cluster_ctarank() { return here->rank; }
inline void barrier_cluster_sync() { wait_at(here->cluster->barrier, blockDim.x * cluster_size); }
