"""Quantising and lifting into the layout ``tiles``, for Hopper: one launch of lift.cu, a CTA per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.slide24.cuda import schedule
from semisparse.formats.slide24.storage.disk import lifted_columns
from semisparse.formats.slide24.storage.gpu import K_TILE_BYTES
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import Argument, CudaSource
from semisparse.runtime.nvrtc import Defines

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The C++ types of x."""

QUANTISE = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
"""The macro QUANTISE, by the dtype to quantise to."""

UNIT = 16
"""Bytes that a thread writes at once."""

Launch = Callable[[Tensor, int, Argument, Argument, Argument, int], None]
"""(x, tokens, lifted, scales, arrivals, count) -> None, as `Lift.prepare` describes."""


def defines(x_dtype: torch.dtype, dtype: torch.dtype | None, vectors: int) -> Defines:
    """Return the macros of lift.cu."""
    return {"IN": SCALARS[x_dtype], "QUANTISE": QUANTISE[dtype], "VECTORS": vectors}


SOURCE = CudaSource(
    Path(__file__).with_name("lift.cu"),
    tuple(defines(x, dtype, vectors) for x in SCALARS for dtype in QUANTISE for vectors in schedule.LIFT_VECTORS),
    architectures=("sm_90a",),
)


@dataclass(frozen=True)
class Lift:
    """How tokens are lifted, each quantised at its own scale or not quantised (algorithm 1, equation 4).

    Args:
        m: maximum tokens.
        k: columns of x.
        window: columns per group, 2N.
        x_dtype: float16 or bfloat16.
        dtype: torch.int8, torch.float8_e4m3fn, or None if x is not quantised.
    """

    m: int
    k: int
    window: int
    x_dtype: torch.dtype
    dtype: torch.dtype | None

    @property
    def token_bytes(self) -> int:
        """Bytes per lifted token: whole K tiles."""
        columns = lifted_columns(self.k, self.window)
        return -(-columns * (self.dtype or self.x_dtype).itemsize // K_TILE_BYTES) * K_TILE_BYTES

    def refusal(self, device: torch.device) -> str | None:
        """Return why a token cannot be lifted on a GPU, or None if it can."""
        limit = device_facts(device).shared_per_cta - schedule.SMALL_STATIC_SHARED
        if self.token_bytes <= limit:
            return None
        return f"a lifted token has {self.token_bytes} bytes, shared memory {limit}"

    def prepare(self, device: torch.device) -> Launch:
        """Load the kernel on a Hopper GPU.

        Returns:
            A function that launches it. It takes x [M, K]; ``tokens``, at least M; the address of ``lifted``, [K tiles,
            tokens, 128] bytes, of which tokens from M on are not written; the address of ``scales``, [M] float32, None
            if x is not quantised; the address and the number of int32 counters to set to 0.
        """
        chosen = schedule.choose_lift(self.m, self.k)
        macros = defines(self.x_dtype, self.dtype, chosen.vectors)
        kernel = SOURCE.build("semisparse_slide24_lift", macros, self.token_bytes).load(device)
        group_pairs, units = self.window // 2, self.token_bytes // UNIT
        reciprocal = schedule.reciprocal_of(group_pairs)

        def launch(x: Tensor, tokens: int, lifted: Argument, scales: Argument, arrivals: Argument, count: int) -> None:
            kernel(
                (x.shape[0], 1, 1), chosen.threads, x=x.contiguous(), lifted=lifted, scales=scales, arrivals=arrivals,
                columns=self.k, group_pairs=group_pairs, tokens=tokens, units=units, count=count, reciprocal=reciprocal,
            )  # fmt: skip

        return launch
