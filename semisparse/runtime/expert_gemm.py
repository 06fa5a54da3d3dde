"""The GEMM of a mixture's experts on Hopper: cuda/expand_gemm with EXPERTS, for jobs of one expert's tokens each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from semisparse.runtime.device import DeviceFacts, device_facts
from semisparse.runtime.experts import Routing
from semisparse.runtime.gemm_schedule import COLUMNS, ROWS, Schedule, Shape, Tiles, fit, tile_m_of
from semisparse.runtime.kernel import Argument, CudaSource, KernelBuild, offsets_in_workspace
from semisparse.runtime.nvrtc import HEADERS, Defines
from semisparse.runtime.operands import bias_as

EXPERT_SPREAD = 2.5
"""A job has room for p + `EXPERT_SPREAD` * sqrt(p) pairs, where p is the average number of pairs per expert."""

PERMUTE_THREADS, PERMUTED_SLOTS = 256, 8
"""Threads per CTA of permute_pairs.cu, and pairs of a job that it permutes."""

PERMUTE_PAIRS = CudaSource(
    HEADERS / "expand_gemm" / "permute_pairs.cu", ({"TILE_M": 16, "BLOCK": 64}, {"TILE_M": 192, "BLOCK": 16})
)


def experts_schedule(
    pairs: int, experts: int, weight: Tiles, gpu: DeviceFacts, shapes: Mapping[int, Shape]
) -> Schedule:
    """Choose the schedule of the experts' GEMM: Stream-K with the smallest tile that an expert's pairs should fit in.

    Args:
        pairs: maximum number of pairs; a pair is a token and one of its experts.
        experts: number of experts.
        weight: an expert's tiles.
        gpu: what it runs on.
        shapes: by tile_m, the shape of the CTAs.
    """
    average = pairs / experts
    tile_m = tile_m_of(round(average + EXPERT_SPREAD * average**0.5), shapes)
    tried = ((tile_m, shapes[tile_m]), (16, (2, 1, 1)), (16, (1, 1, 1)))
    fitting = (fit(weight, gpu, m, warpgroups, cluster, 0, ctas) for m, (warpgroups, cluster, ctas) in tried)
    return next(schedule for schedule in fitting if schedule is not None)


def prepare_experts(
    kernel: Callable[[Schedule], KernelBuild],
    schedule: Schedule,
    weight: Tiles,
    block: int,
    shape: tuple[int, int],
    device: torch.device,
) -> Callable[[Tensor, Mapping[str, Argument], Tensor | None, Routing], Tensor]:
    """Compile and load a format's kernel for a stack of experts, and permute_pairs.cu.

    Args:
        kernel: returns the format's kernel for a schedule.
        schedule: how y is computed, with Stream-K.
        weight: an expert's tiles.
        block: BLOCK of permute_pairs.cu.
        shape: (N, K) of an expert.
        device: where all operands are.
    Returns:
        (x [rows, K], the kernel's own arguments, bias [experts * N] or None, the step's routing) -> y [pairs, N],
        accumulated in float32. A row of x is that of a token, or that of a pair.
    """
    (n, k), sms = shape, device_facts(device).sms
    tile_m, column_tiles = schedule.tile_m, weight.column_tiles
    defines: Defines = {"TILE_M": tile_m, "BLOCK": block}
    permute = PERMUTE_PAIRS.build("semisparse_permute_pairs", defines).load(device)
    gemm = kernel(schedule).load(device)
    ctas = schedule.ctas_per_sm * sms // schedule.cluster * schedule.cluster
    counters, columns = ctas * schedule.warps, -(-32 * column_tiles // PERMUTE_THREADS)

    def matmul(x: Tensor, operands: Mapping[str, Argument], bias: Tensor | None, routing: Routing) -> Tensor:
        x, jobs = x.contiguous(), routing.jobs(tile_m)
        y = x.new_empty(routing.pairs, n)
        permuted_bytes = 2 * COLUMNS * column_tiles * tile_m * jobs.most
        *offsets, size = offsets_in_workspace(permuted_bytes, 4 * counters, 4 * counters * ROWS * tile_m)
        workspace = x.new_empty(size, dtype=torch.uint8)
        permuted, counter, partials = [workspace.data_ptr() + offset for offset in offsets]
        permute(
            (columns, tile_m // PERMUTED_SLOTS, jobs.most), PERMUTE_THREADS,
            x=x, job_count=jobs.count, job_pairs=jobs.pairs, permuted=permuted, counters=counter,
            pairs_per_x=routing.pairs // x.shape[0], k=k, column_tiles=column_tiles, counter_count=counters,
            aligned=k % 2 == 0 and x.data_ptr() % 4 == 0,
        )  # fmt: skip
        gemm(
            (ctas, 1, 1), schedule.threads, pdl=True,
            x=permuted, **operands, bias=bias_as(bias, x.dtype), y=y,
            partials=partials, counters=counter,
            job_count=jobs.count, job_experts=jobs.experts, job_pairs=jobs.pairs,
            n=n, row_tiles=weight.row_tiles, column_tiles=column_tiles,
        )  # fmt: skip
        return y

    return matmul
