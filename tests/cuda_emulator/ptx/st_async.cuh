// Stands in for ptx/st_async.cuh.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

void st_async(Word to, Word word, Word mbarrier, Word rank);
