// Stands in for ptx/st_async.cuh.

#pragma once

#include "mbarrier.cuh"
#include "shared.cuh"

void st_async(Word to, Word word, Word mbarrier, Word rank);
void st_async_v4(Word to, float4 values, Word mbarrier, Word rank);
