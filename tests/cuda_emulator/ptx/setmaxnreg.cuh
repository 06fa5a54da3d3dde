// Stands in for ptx/setmaxnreg.cuh: fibers have stacks.

#pragma once

template <int registers> void setmaxnreg_dec() {}
template <int registers> void setmaxnreg_inc() {}
