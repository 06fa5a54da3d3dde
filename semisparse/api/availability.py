"""Which formats and kernels there are, and which kernels run on this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from semisparse.bench.roofline import Candidate, packed_sample
from semisparse.formats.base import Format, get_format, registry
from semisparse.formats.kernel import Kernel, Problem
from semisparse.patterns import parse_pattern

EXAMPLE_PATTERNS = tuple(parse_pattern(text) for text in ("6:8", "32:64", "8:32v32", "g16@50%", "70%"))
"""Patterns that kernels are tried with: one or two of each family."""

SHAPE = (4096, 4096)
"""N and K of the layer that kernels are tried with."""


def list_formats() -> list[dict[str, Any]]:
    """Return a dict per format: its name, version and summary, the example patterns it accepts, and its kernels.

    ``runs`` says whether a kernel takes one token and a 4096 x 4096 layer of at least one example pattern and variant.
    CUDA kernels are asked in float16, others in float32 on the CPU. The layer is in the layout that it has on that
    device: a CUDA kernel may read mask tiles, which no file has. If the kernel does not take it, ``reason`` says why.
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


def _describe(form: Format, kernel: Kernel) -> dict[str, Any]:
    reason = _refusal(form, kernel)
    return {"name": kernel.name, "device": kernel.device or "any", "runs": reason is None, "reason": reason}


def _refusal(form: Format, kernel: Kernel) -> str | None:
    """Return the first reason of a kernel's refusals, or None if it takes one example pattern and variant."""
    if kernel.device == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    device = kernel.device or "cpu"
    dtype = torch.float32 if device == "cpu" else torch.float16
    reasons = []
    for pattern in EXAMPLE_PATTERNS:
        if form.accepts(pattern) is None:
            for options in form.variants:
                reason = kernel.refusal(_problem(Candidate(form.name, str(pattern), options), dtype, device))
                if reason is None:
                    return None
                reasons.append(reason)
    return reasons[0] if reasons else "the format accepts none of the example patterns"


@lru_cache(maxsize=256)
def _problem(candidate: Candidate, dtype: torch.dtype, device: str) -> Problem:
    """Return the problem of one token and a layer of `SHAPE` on a device, in the layout that it has there."""
    sample = packed_sample(candidate, *SHAPE, dtype).to(device)
    spec = get_format(candidate.format).structure(sample.spec)
    return Problem(1, replace(spec, shape=SHAPE), dtype, torch.device(device))
