"""Layers whose format gains no speed on a machine, whatever the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from semisparse.bench.machines import Machine, known_gpu
from semisparse.bench.plan import MIN_SPEEDUP
from semisparse.bench.roofline import BASELINE, Candidate, estimate_matmul
from semisparse.errors import SemisparseError
from semisparse.formats import Packed
from semisparse.patterns import NO_ZEROS

TOKENS = (1, 8, 32, 128, 512, 2048)
"""Tokens M at which a layer may gain."""


def machine_here(device: torch.device) -> Machine | None:
    """Return the GPU that ``device`` is, if gpus.yaml has it; nothing is measured for a line of a report."""
    return known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def without_gain(layers: Mapping[str, Packed], machine: Machine) -> list[str]:
    """Return the layers whose speed-up over dense is below `MIN_SPEEDUP` at every M of `TOKENS`.

    Args:
        layers: packed weights by module name.
        machine: the GPU. Times are those of `plan`: measured by `bench tune` if there are any, else predicted.
    """

    @cache
    def gains(candidate: tuple[str, str, str], n: int, k: int, dtype: torch.dtype) -> bool:
        form, pattern, kind = candidate
        packed = Candidate(form, pattern, {"kind": kind} if kind else {})
        dense = Candidate(BASELINE, NO_ZEROS)
        for m in TOKENS:
            try:
                seconds = [estimate_matmul(one, m, n, k, dtype, machine)[0].seconds for one in (dense, packed)]
            except SemisparseError:
                return True  # there is no prediction to report
            if seconds[0] >= MIN_SPEEDUP * seconds[1]:
                return True
        return False

    return [
        name
        for name, packed in layers.items()
        if not gains(
            (packed.spec.format, str(packed.spec.pattern), str(packed.params.get("kind", ""))),
            *packed.spec.shape,
            packed.spec.dtype,
        )
    ]
