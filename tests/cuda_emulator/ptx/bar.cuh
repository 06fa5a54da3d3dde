// Stands in for ptx/bar.cuh.

#pragma once

#include "../machine.cuh"

template <int threads> void bar_sync(int barrier) { wait_at(here->named[barrier], threads); }

template <int threads> void bar_arrive(int barrier) {
    Barrier& found = here->named[barrier];
    if (++found.arrived < threads) return;
    found.arrived = 0;
    ++found.generation;
    ++progress;
}
