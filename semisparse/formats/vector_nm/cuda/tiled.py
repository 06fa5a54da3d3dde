"""The host code of `gemm` and `gemm_fp32`: transpose x and compute column information, then launch one tiled GEMM."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import KernelError
from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import column_info
from semisparse.formats.vector_nm.cuda.operands import operands_refusal
from semisparse.formats.vector_nm.cuda.schedule import TILES, GemmSchedule, choose_gemm, gemm_lengths, gemm_schedule
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned, bias_as


def common_defines(dtype: torch.dtype, shortest: VectorNM) -> tuple[Defines, ...]:
    """Return the macros of each tile, with columns of x packed (4:32) and not (16:32), and those of ``shortest``."""
    half, eighth, tiles = VectorNM(16, 32, 32), VectorNM(4, 32, 32), TILES[dtype.itemsize]
    wanted = [(pattern, tile, pattern is eighth) for tile in tiles for pattern in (half, eighth)]
    wanted.append((shortest, tiles[1], False))
    schedules = [gemm_schedule(pattern, tile, dtype, packed) for pattern, tile, packed in wanted]
    return tuple(schedule.defines for schedule in schedules if schedule)


def refusal(problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why a tiled GEMM of these dtypes cannot compute ``problem``; None if it can."""
    if problem.dtype not in dtypes:
        return f"computes {' and '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {problem.dtype}"
    reason = operands_refusal(problem)
    if reason is None and schedule_for(problem) is None:
        lengths = ", ".join(map(str, gemm_lengths(problem.dtype.itemsize)))
        return f"takes vectors of {lengths} rows whose stages fit shared memory, not {problem.pattern}"
    return reason


def schedule_for(problem: Problem) -> GemmSchedule | None:
    """Return the schedule for ``problem``; None if the pattern has none."""
    facts, pattern = device_facts(problem.device), vectors_of(problem.pattern)
    return choose_gemm(pattern, problem.m, problem.n, problem.dtype, facts.sms, facts.shared_per_cta)


def prepare(problem: Problem, source: CudaSource, schedule: GemmSchedule | None) -> Product:
    """Return the matmul for ``problem``; ``schedule`` overrides that of `schedule_for`.

    Raises:
        KernelError: the pattern has no schedule.
    """
    schedule = schedule or schedule_for(problem)
    if schedule is None:
        raise KernelError(f"no tile of {problem.pattern} fits shared memory")
    n, tile, threads = problem.n, schedule.tile, schedule.threads
    (groups, slots), row_tiles = groups_and_slots(problem.spec), -(-n // tile.n)
    info = column_info.prepare(problem, schedule)
    build = source.build(f"semisparse_vector_nm_{source.path.stem}", schedule.defines, schedule.shared)
    kernel = build.load(problem.device)
    aligned_y = int(n * problem.dtype.itemsize % 16 == 0)
    sizes = {"n": n, "groups": groups, "slots": slots, "stages": -(-slots // schedule.slots), "aligned": aligned_y}

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, values, bias = aligned(x), aligned(packed.tensors["values"]), bias_as(bias, x.dtype)
        x_t, columns, offsets = info(x, packed.tensors["positions"].contiguous())
        m, pitch = x.shape[0], x_t.shape[1]
        y = x.new_empty(m, n)
        operands = {"x_t": x_t, "values": values, "columns": columns, "offsets": offsets, "bias": bias, "y": y}
        kernel((pitch // tile.m, row_tiles, 1), threads, pdl=False, **operands, m=m, pitch=pitch, **sizes)
        return y

    return multiply
