"""`unpack`: the whole weight unpacked from row panels, then cuBLAS, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.decode import panels_refusal
from semisparse.formats.ec_csr.cuda.schedule import UNPACK_WARPS, UnpackSchedule, unpack_schedule
from semisparse.formats.ec_csr.storage.deltas import LANES
from semisparse.formats.ec_csr.storage.panels import lists_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource

MAX_COLUMNS = 1 << 23
"""Maximum K: with more, the bytes of a panel do not fit 32 bits."""

SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    tuple(
        UnpackSchedule(*lists).defines
        for lists in (
            (torch.float16, 4, 4096, 32, False),
            (torch.float32, 8, 1 << 20, 64, True),
            (torch.bfloat16, 8, 4096, 64, True),
            (torch.float32, 4, 4096, 32, False),
        )
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.k > MAX_COLUMNS:
        return f"takes up to {MAX_COLUMNS} columns, got {problem.k}"
    return panels_refusal(problem)


def prepare(problem: Problem) -> Product:
    """Load the kernel; return the matmul, which unpacks w and calls cuBLAS. x has w's dtype."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Load the kernel, and return a function from a weight to its dense form: [N, K], a view of rows padded to a
    multiple of 32 columns.
    """
    facts, n, k = device_facts(problem.device), problem.n, problem.k
    schedule = unpack_schedule(problem, facts)
    build = SOURCE.build("semisparse_ec_csr_unpack", schedule.defines, schedule.shared_bytes)
    kernel = build.load(problem.device)
    tiles, lane_columns = schedule.tiles, schedule.lane_columns
    sizes = {"n": n, "lane_columns": lane_columns, "tiles": tiles, "tile_positions": schedule.tile_positions}
    grid = (-(-n // schedule.panel_rows) * tiles, 1, 1)

    def unpack(packed: Packed) -> Tensor:
        weight = packed.tensors["values"].new_empty(n, lane_columns * LANES)
        kernel(grid, LANES * UNPACK_WARPS, pdl=facts.has_pdl, **lists_of(packed), weight=weight, **sizes)
        return weight[:, :k]

    return unpack
