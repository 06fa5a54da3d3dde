"""Which formats and kernels there are, and which kernels run on this machine."""

from __future__ import annotations

from typing import Any

import torch

from semisparse.bench.roofline import Candidate, problem_for
from semisparse.formats.base import Format, registry
from semisparse.formats.kernel import Kernel
from semisparse.patterns import parse_pattern


def list_formats() -> list[dict[str, Any]]:
    """Return every format with the patterns it stores and its kernels: whether each runs here, or why not.

    A kernel runs here if it supports one token and a 4096 x 4096 layer, in float16 on a GPU and float32 on a CPU.
    """
    return [
        {
            "name": form.name,
            "version": form.version,
            "summary": form.summary,
            "patterns": [str(pattern) for pattern in EXAMPLE_PATTERNS if form.accepts(pattern) is None],
            "kernels": [_describe(form, kernel) for kernel in form.all_kernels],
        }
        for form in registry().values()
    ]


EXAMPLE_PATTERNS = tuple(parse_pattern(text) for text in ("6:8", "32:64", "8:32v32", "g16@50%", "70%"))
"""One or two of each family of patterns."""

SHAPE = (4096, 4096)
"""N and K of the layer that a kernel must support."""


def _describe(form: Format, kernel: Kernel) -> dict[str, Any]:
    reason = _refusal(form, kernel)
    return {"name": kernel.name, "device": kernel.device or "any", "runs": reason is None, "reason": reason}


def _refusal(form: Format, kernel: Kernel) -> str | None:
    """Return why a kernel runs for none of the example patterns and variants, or None if it runs for one."""
    if kernel.device == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    device = kernel.device or "cpu"
    dtype = torch.float32 if device == "cpu" else torch.float16
    reasons = []
    for pattern in EXAMPLE_PATTERNS:
        if form.accepts(pattern) is None:
            for options in form.variants:
                problem, _ = problem_for(Candidate(form.name, str(pattern), options), 1, *SHAPE, dtype, device)
                reason = kernel.refusal(problem)
                if reason is None:
                    return None
                reasons.append(reason)
    return reasons[0] if reasons else "it stores none of the example patterns"
