"""The kernels of attention.cu: their variants, how each divides the positions of a token, and their workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from semisparse.engine.ops import FOLDER
from semisparse.runtime.kernel import HOPPER, CudaSource
from semisparse.runtime.nvrtc import Defines

_FEW: Defines = {"WARPS": 4, "AHEAD": 2, "CTAS": 2, "CLUSTER": 1, "PAGE": 0}
ATTENTION = CudaSource(
    FOLDER / "attention.cu",
    (
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 8, "CTAS": 3},
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "WARPS": 8, "AHEAD": 5},
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 5, "CTAS": 4},
        {"SCALAR": "__half", "DIM": 128, "GROUP": 8, "ROPE": 1, **_FEW},
        {"SCALAR": "float", "DIM": 64, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 4, "CTAS": 3},
        {"SCALAR": "__half", "DIM": 256, "GROUP": 4, "ROPE": 0, **_FEW, "CTAS": 3},
        {"SCALAR": "__half", "DIM": 8, "GROUP": 8, "ROPE": 0, **_FEW},
        {"SCALAR": "__half", "DIM": 64, "GROUP": 6, "ROPE": 0, **_FEW, "PAGE": 16},
    ),
)
CLUSTERED_ATTENTION = CudaSource(
    FOLDER / "attention.cu",
    (
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 10, "CTAS": 3, "CLUSTER": 8},
        {"SCALAR": "__half", "DIM": 64, "GROUP": 4, "ROPE": 1, **_FEW, "CTAS": 3, "CLUSTER": 5},
        {"SCALAR": "float", "DIM": 256, "GROUP": 2, "ROPE": 0, **_FEW, "AHEAD": 4, "CTAS": 3, "CLUSTER": 2},
        {
            "SCALAR": "__nv_bfloat16",
            "DIM": 128,
            "GROUP": 1,
            "ROPE": 0,
            **_FEW,
            "AHEAD": 10,
            "CTAS": 3,
            "CLUSTER": 8,
            "PAGE": 16,
        },
    ),
    architectures=("sm_90a", "sm_100a"),
)

MAX_GROUP = 8
"""Maximum query heads per CTA of attention.cu. A key-value head with more takes several CTAs."""

WARPS = 4
"""Warps per CTA of attention.cu, but for one wave of CTAs with unsplit positions and one query head each."""

MIN_SPLIT = 64
"""Minimum positions per split of attention.cu."""

RESIDENT_CTAS = 3
"""CTAs of attention.cu per SM, by its registers (up to 4 query heads per CTA; else 2)."""

MAX_CLUSTER = 8
"""Maximum CTAs of a cluster that every GPU with clusters has."""

SHARED_BYTES = 47 << 10
"""Shared memory that partial results of a CTA may take: a kernel has 48 KB without asking for more."""

MAX_SPLITS = 64
"""Maximum splits of the positions."""


@dataclass(frozen=True)
class Schedule:
    """How attention.cu divides the positions of a token.

    Args:
        splits: ranges of positions, a CTA each.
        warps: warps per CTA.
        ahead: positions per team of lanes whose loads are in flight.
        ctas: CTAs per SM that registers leave room for.
        clustered: whether the splits are a cluster.
    """

    splits: int
    warps: int
    ahead: int
    ctas: int
    clustered: bool = False

    @property
    def source(self) -> CudaSource:
        """The variants of attention.cu with or without clusters."""
        return CLUSTERED_ATTENTION if self.clustered else ATTENTION

    @property
    def defines(self) -> Defines:
        """The macros of attention.cu that depend on the schedule."""
        cluster = self.splits if self.clustered else 1
        return {"WARPS": self.warps, "AHEAD": self.ahead, "CTAS": self.ctas, "CLUSTER": cluster}


def grouping(heads: int, kv_heads: int) -> tuple[int, int]:
    """Return the query heads per CTA, and the CTAs that a token takes if its positions are not split."""
    per_kv = heads // kv_heads
    group = min(per_kv, MAX_GROUP)
    return group, kv_heads * -(-per_kv // group)


@cache
def choose_schedule(
    ctas: int, group: int, dim: int, length: int | None, value_bytes: int, sms: int, capability: tuple[int, int]
) -> Schedule:
    """Return the schedule: enough splits for two CTAs per SM, but not more CTAs than are resident.

    Microseconds of attention in a layer of llama2-7b at position 560 (H200, results/h200/sweeps/attention.csv,
    decode-fused.csv). One sequence: splits in a cluster 5.6, exchanging through global memory 7.9; 8 positions per team
    in flight, a few less than a split has, instead of 9 cost 0.5 to 1.2 us more. Eight sequences: unsplit 18.8 with 8
    warps and 20.4 with 4; in two splits with global memory, where a quarter of the CTAs waits for an SM, 26.2.

    CTAs of 8 warps that take more than one wave leave SMs idle at their begin and end. With 4 warps, at position 160, a
    step of 8 layers takes 998 us instead of 1,038 for 32 sequences, 1,274 and 1,366 for 64, 1,777 and 1,889 for 128,
    but 671 and 660 for 8, whose 256 CTAs fit at once (results/h200/sweeps/attention-many.csv).

    Args:
        ctas: key-value heads times tokens times groups of query heads.
        group: query heads per CTA.
        dim: values of a head.
        length: of the cache; None if the number of splits must not depend on it.
        value_bytes: bytes of a value of the cache.
        sms: the GPU's SMs.
        capability: the GPU's compute capability.
    """
    resident = RESIDENT_CTAS * sms // ctas
    most = MAX_SPLITS if length is None else max(1, length // MIN_SPLIT)
    splits = max(1, min(-(-2 * sms // ctas), resident, most, MAX_SPLITS))
    clustered = 1 < splits <= MAX_CLUSTER + 1 and group <= MAX_GROUP // 2 and capability >= HOPPER
    if clustered:  # every CTA has room for the partial results of its warps, and of all splits
        splits = min(splits, MAX_CLUSTER, SHARED_BYTES // (4 * group * (dim + 4)) - WARPS)
    if group == 1 and value_bytes == 2 and splits == 1:
        return Schedule(splits, WARPS, ahead=5, ctas=4) if ctas > 2 * sms else Schedule(splits, 8, ahead=5, ctas=2)
    alone = 4 if value_bytes == 4 else 10 if clustered else 8  # with a query head per CTA; more would spill
    ahead = {1: alone, 2: 4}.get(group, 2)
    return Schedule(splits, WARPS, ahead, 2 if group > 4 else RESIDENT_CTAS, clustered)


@cache
def workspace_of(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial results, and counters, which every launch leaves at 0.

    All layers share it: kernels on one stream run one after another.
    """
    return torch.empty(floats, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
