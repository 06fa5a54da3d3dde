"""What the kernels of a mixture of experts share: a step's pairs, its jobs, and the sum over each token's experts.

A pair is a token and one of the experts that its router chose. Nothing here waits for the GPU: it can be captured
in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import SCALARS, THREADS, vector_of
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import HEADERS, Defines

MAX_EXPERTS = 4096
"""Maximum experts of a layer: route.cu counts the pairs of all in shared memory."""

ROUTE = CudaSource(
    HEADERS / "experts" / "route.cu",
    ({"TILE_M": 16, "EXPERT_COUNT": 8}, {"TILE_M": 256, "EXPERT_COUNT": MAX_EXPERTS}),
)
COMBINE = CudaSource(
    HEADERS / "experts" / "combine.cu",
    (
        {"SCALAR": "__half", "VECTOR": 8, "WEIGHT": "float"},
        {"SCALAR": "__nv_bfloat16", "VECTOR": 1, "WEIGHT": "__nv_bfloat16"},
    ),
)

FEW_THREADS = 64
"""Threads per CTA of combine.cu where 256 would occupy a few SMs only: one token 0.1 us faster (H200)."""

ROUTE_THREADS = 256
"""Threads per CTA of route.cu."""


@dataclass(frozen=True)
class Jobs:
    """A step's pairs, sorted by expert and cut into jobs of up to ``tile_m`` pairs of one expert.

    Args:
        most: maximum number of jobs.
        count: [1] int32, the number of jobs.
        experts: [most] int32, the expert of each job.
        pairs: [most, tile_m] int32, its pairs, and -1 where it has fewer.
    """

    most: int
    count: Tensor
    experts: Tensor
    pairs: Tensor


class Routing:
    """The experts that a step's tokens chose.

    Args:
        chosen: [tokens, top_k] integers; an expert that does not exist computes nothing.
        experts: number of experts.

    Attributes:
        pairs: tokens * top_k.
        top_k: experts per token.
        complete: whether ``chosen`` is certainly written when a later kernel on the stream starts. It is once a kernel
            has waited for it (``griddepcontrol.wait``) before it let its dependents start. Later kernels may then read
            ``chosen``, and what was launched before it, without waiting for their own predecessor.
    """

    def __init__(self, chosen: Tensor, experts: int) -> None:
        self.chosen = chosen.long().contiguous()
        self.experts = experts
        self.pairs, self.top_k = chosen.numel(), chosen.shape[1]
        self.complete = False
        self._jobs: dict[int, Jobs] = {}

    def jobs(self, tile_m: int) -> Jobs:
        """Return the jobs of up to ``tile_m`` pairs, computed on the GPU at the first call."""
        if tile_m not in self._jobs:
            self._jobs[tile_m] = self._divided(tile_m)
        return self._jobs[tile_m]

    def _divided(self, tile_m: int) -> Jobs:
        most = most_jobs(self.pairs, self.experts, tile_m)
        numbers = self.chosen.new_empty(1 + most * (1 + tile_m), dtype=torch.int32)
        count, experts, pairs = numbers.split((1, most, most * tile_m))
        defines: Defines = {"TILE_M": tile_m, "EXPERT_COUNT": self.experts}
        ROUTE.build("semisparse_route", defines).load(self.chosen.device)(
            (self.experts, 1, 1), ROUTE_THREADS,
            chosen=self.chosen, job_count=count, job_experts=experts, job_pairs=pairs, pairs=self.pairs,
        )  # fmt: skip
        return Jobs(most, count, experts, pairs)

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, summed in float32 in the order of the pairs.

        Args:
            outputs: [pairs, N], contiguous.
            weights: [tokens, top_k], the router's, computed before the first matmul was launched.
        Returns:
            [tokens, N] in the outputs' dtype.
        """
        # A copy is made just before: the kernel must wait for it.
        complete = self.complete and weights.is_contiguous()
        weights, columns = weights.contiguous(), outputs.shape[1]
        y = outputs.new_empty(len(self.chosen), columns)
        vector = vector_of(y.dtype, [columns], [outputs])
        defines: Defines = {"SCALAR": SCALARS[y.dtype], "VECTOR": vector, "WEIGHT": SCALARS[weights.dtype]}
        facts, parts = device_facts(y.device), -(-columns // (THREADS * vector))
        threads = THREADS if len(y) * parts * THREADS // FEW_THREADS > facts.sms else FEW_THREADS
        COMBINE.build("semisparse_combine", defines).load(y.device)(
            (len(y), -(-columns // (threads * vector)), 1), threads, pdl=facts.has_pdl,
            outputs=outputs, chosen=self.chosen, weights=weights, y=y,
            columns=columns, top_k=self.top_k, experts=self.experts, complete=complete,
        )  # fmt: skip
        return y


def most_jobs(pairs: int, experts: int, tile_m: int) -> int:
    """Return the maximum number of jobs: one for each ``tile_m`` pairs, and a last one of fewer for each expert."""
    return min(pairs, experts) + max(pairs - experts, 0) // tile_m
