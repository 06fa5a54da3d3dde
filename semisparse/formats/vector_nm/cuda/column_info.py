"""Transpose x and compute the column information of the tiled GEMMs, in one launch (column_info.cu).

A group is `length` rows of the weight that keep the same columns; a slot is one kept column of a group. Along K a GEMM
is a loop over pipeline stages; each copies columns of x to a buffer in shared memory. The column information says, for
each slot, where in its stage's buffer its column of x is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.cuda.schedule import GemmSchedule
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.kernel import CudaSource, KernelBuild

SOURCE = CudaSource(Path(__file__).with_name("column_info.cu"), ({"BYTES": 2}, {"BYTES": 4}))

THREADS, WARPS = 256, 8
TILE = 64
"""A CTA transposes a tile of ``TILE`` tokens x ``TILE`` columns of x."""


ColumnInfo = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor]]
"""(x [M, K], positions [groups, slots]) -> x_t, columns, offsets; of these only x_t depends on x and on M.

A schedule packs columns if a stage's buffer holds only those that some group of the row tile keeps, instead of all
columns of the stage's windows.

x_t: [K padded, M padded to whole CTA tiles] in x's dtype, zeros past K and M. K is padded to whole windows if the
schedule packs columns, else to whole stages. ``columns``: [row_tiles, stages, columns per stage] int32, the columns of
x in each stage's buffer, -1 past the last; None unless the schedule packs columns. ``offsets``: [row_tiles, stages,
groups per tile, slots per stage] int32, where each slot's column is in the buffer (encoded as column_info.cu says).
Here ``stages`` counts all stages along K; `GemmSchedule.stages` counts the buffers.
"""


def prepare(problem: Problem, schedule: GemmSchedule) -> ColumnInfo:
    """Return the function that transposes x and computes the column information for ``schedule``."""
    k, pattern, (groups, slots) = problem.k, vectors_of(problem.pattern), groups_and_slots(problem.spec)
    row_tiles, stages = -(-problem.n // schedule.tile.n), -(-slots // schedule.slots)
    width = -(-k // pattern.window) * pattern.window if schedule.packed else stages * schedule.columns
    tasks = row_tiles * stages * (1 if schedule.packed else schedule.groups)
    kernel = _build(problem.dtype.itemsize, pattern, schedule.slots).load(problem.device)
    sizes = {
        "keep": pattern.keep,
        "window": pattern.window,
        "groups": groups,
        "slots": slots,
        "length": pattern.length,
        "tile_n": schedule.tile.n,
        "stage_slots": schedule.slots,
        "stages": stages,
        "stage_columns": schedule.columns,
        "column_bytes": schedule.column_bytes,
        "tasks": tasks,
    }

    def column_info(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        m = x.shape[0]
        pitch = -(-m // schedule.tile.m) * schedule.tile.m
        transpose_tiles = -(-width // TILE) * -(-pitch // TILE)
        x_t = x.new_empty(width, pitch)
        offsets = x.new_empty(row_tiles, stages, schedule.groups, schedule.slots, dtype=torch.int32)
        columns = x.new_empty(row_tiles, stages, schedule.columns, dtype=torch.int32) if schedule.packed else None
        tensors = {"x": x, "x_t": x_t, "positions": positions, "columns": columns, "offsets": offsets}
        x_sizes = {"m": m, "k": k, "x_columns": width, "pitch": pitch, "transpose_tiles": transpose_tiles}
        kernel((transpose_tiles + -(-tasks // WARPS), 1, 1), THREADS, pdl=False, **tensors, **x_sizes, **sizes)
        return x_t, columns, offsets

    return column_info


def _build(itemsize: int, pattern: VectorNM, stage_slots: int) -> KernelBuild:
    """Return the kernel for elements of ``itemsize`` bytes.

    Shared memory holds a tile of x in CTAs that transpose. In the other CTAs it holds a bit mask per warp, with one bit
    for each column that a stage may hold.
    """
    mask_words = -(-((stage_slots - 1) // pattern.keep + 2) * pattern.window // 32)
    shared = max(TILE * (TILE + 4 // itemsize) * itemsize, WARPS * 4 * mask_words)
    return SOURCE.build("semisparse_vector_nm_column_info", {"BYTES": itemsize}, shared)
