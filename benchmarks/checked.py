"""Times of matmuls on a GPU whose outputs are verified first, and launches for a profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from semisparse.bench import timing
from semisparse.errors import KernelError

GPU = torch.device("cuda")

CHECKED_ROWS = 64
"""Rows of the output, the last ones, that are compared with the expected ones."""


def checked_error(expected: Tensor, tolerance: float, y: Tensor) -> float:
    """Return the relative error of the last rows.

    Raises:
        KernelError: it is larger than rounding explains.
    """
    error = ((y[-CHECKED_ROWS:].float() - expected).norm() / expected.norm()).item()
    if not error <= 1.05 * tolerance:
        raise KernelError(f"relative error {error:.3g}, at most {tolerance:.3g} is right")
    return error


def timed(calls: Sequence[Callable[[], Tensor]], check: Callable[[Tensor], float]) -> dict[str, str]:
    """Verify the first call twice, which must repeat its bits, and time all."""
    y = calls[0]()
    error = check(y)
    if not torch.equal(y, calls[0]()):
        raise KernelError("two launches differ")
    found = timing.time_calls(calls, GPU)
    times = {name: f"{getattr(found, name):.2f}" for name in ("us", "low_us", "high_us")}
    return {**times, "error": f"{error:.1e}"}


def launch_for_profiler(calls: Iterable[Callable[[], Tensor]]) -> None:
    """Launch each call once, between cudaProfilerStart and cudaProfilerStop."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
