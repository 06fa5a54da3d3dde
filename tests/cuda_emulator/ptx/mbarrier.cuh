// Stands in for ptx/mbarrier.cuh.

#pragma once

#include "../machine.cuh"

void mbarrier_init(Word mbarrier, int count);
void mbarrier_arrive(Word mbarrier);
void mbarrier_arrive_expect_tx(Word mbarrier, int bytes);
void mbarrier_arrive_cluster(Word mbarrier, Word rank);
void mbarrier_wait_parity(Word mbarrier, int parity);
inline void fence_mbarrier_init() {}
