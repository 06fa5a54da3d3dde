"""gemm.cu: y for any number of tokens, expanding the tiles into the registers that wgmma reads, on Hopper."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda import operands
from semisparse.formats.bitmask.cuda.schedule import PERMUTE_THREADS, GemmSchedule, choose_gemm, gemm_launch
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines

MAX_TOKENS = 65_280
"""permute_x.cu has a row of CTAs per token, padded to tiles of up to 256; a grid has 65,535 along y."""


def _defines(dtype: torch.dtype, keep: int, schedule: GemmSchedule) -> Defines:
    """Return the macros: the schedule's fields in capitals, and two more."""
    fields = {name.upper(): value for name, value in asdict(schedule).items()}
    return {"SCALAR": operands.SCALARS[dtype], "KEEP": keep, **fields}


PERMUTE_X = CudaSource(Path(__file__).with_name("permute_x.cu"), ({"TILE_M": 32}, {"TILE_M": 256}))

GEMM = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (
        # tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
        _defines(torch.float16, 32, GemmSchedule(64, 2, 2, 0, 3, 2, 1)),
        _defines(torch.float16, 64, GemmSchedule(256, 2, 2, 0, 1, 1, 1)),
        _defines(torch.bfloat16, 31, GemmSchedule(32, 1, 1, 4, 3, 1, 3)),
        _defines(torch.bfloat16, 32, GemmSchedule(192, 2, 1, 4, 3, 1, 1)),
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return operands.refusal(problem) or hopper_refusal(problem.device)


def prepare(problem: Problem, schedule: GemmSchedule | None = None) -> Product:
    """Compile and load both kernels for one problem.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes, stages and split-K; None for the one that should be fastest.
    Returns:
        The product, accumulated in float32.
    """
    n, k, device = problem.n, problem.k, problem.device
    gpu, weight = device_facts(device), tiling(problem.spec)
    schedule = schedule or choose_gemm(problem.m, weight, gpu)
    permute_x = PERMUTE_X.build("semisparse_bitmask_permute_x", {"TILE_M": schedule.tile_m}).load(device)
    defines = _defines(problem.dtype, weight.keep, schedule)
    kernel = GEMM.build("semisparse_bitmask_gemm", defines, schedule.shared(weight)).load(device)
    threads, even_k = 32 * schedule.warps + 128, k % 2 == 0
    row_tiles, column_tiles = weight.row_tiles, weight.column_tiles
    launch_of = lru_cache(maxsize=64)(lambda m: gemm_launch(schedule, m, weight, gpu.sms))

    def gemm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, m = x.contiguous(), x.shape[0]
        launch = launch_of(m)
        y = x.new_empty(m, n)
        workspace = x.new_empty(launch.workspace, dtype=torch.uint8)
        begin = workspace.data_ptr()
        permuted, counters, partials = [begin + offset for offset in launch.offsets]
        permute_x(
            launch.permute_grid, PERMUTE_THREADS,
            x=x, permuted=permuted, counters=counters,
            m=m, k=k, column_tiles=column_tiles, counter_count=launch.counters,
            aligned=even_k and x.data_ptr() % 4 == 0,
        )  # fmt: skip
        # It may start before permute_x has ended: what it reads from it, the permuted x and the counters, it waits for.
        kernel(
            (launch.ctas, 1, 1), threads, pdl=True,
            x=permuted, tiles=packed.tensors["tiles"], bias=operands.bias_for(x, bias), y=y,
            partials=partials, counters=counters,
            m=m, n=n, row_tiles=row_tiles, column_tiles=column_tiles,
        )  # fmt: skip
        return y

    return gemm
