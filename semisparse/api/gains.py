"""Layers whose format gains no speed on a machine, whatever the number of tokens, or loses it from some number on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from semisparse.bench.machines import Machine, known_gpu
from semisparse.bench.plan import MIN_SPEEDUP
from semisparse.bench.roofline import BASELINE, Candidate, estimate_matmul
from semisparse.errors import SemisparseError
from semisparse.formats import Packed, get_format
from semisparse.patterns import NO_ZEROS

TOKENS = (1, 8, 32, 128, 512, 2048)
"""Tokens M at which a layer may gain."""

Speedups = Mapping[str, tuple[float, ...] | None]
"""By layer its speed-up over dense at each M of `TOKENS`; None if there is no prediction."""


def machine_here(device: torch.device) -> Machine | None:
    """Return the GPU that ``device`` is, if gpus.yaml has it; nothing is measured for a line of a report."""
    return known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def speedups_of(layers: Mapping[str, Packed], machine: Machine) -> Speedups:
    """Return the layers' speed-ups over dense.

    Args:
        layers: packed weights by module name.
        machine: the GPU. Times are those of `plan`: measured by `bench tune` if there are any, else predicted.
    """

    @cache
    def speedups(candidate: Candidate, options: str, n: int, k: int, dtype: torch.dtype) -> tuple[float, ...] | None:
        dense = Candidate(BASELINE, NO_ZEROS)
        try:
            seconds = [
                [estimate_matmul(one, m, n, k, dtype, machine)[0].seconds for one in (dense, candidate)] for m in TOKENS
            ]
        except SemisparseError:
            return None
        return tuple(of_dense / of_packed for of_dense, of_packed in seconds)

    by_layer = {}
    for name, packed in layers.items():
        variant = get_format(packed.spec.format).tuned_by
        options = {key: packed.params[key] for key in variant if key in packed.params}
        candidate = Candidate(packed.spec.format, str(packed.spec.pattern), options)
        by_layer[name] = speedups(candidate, str(options), *packed.spec.shape, packed.spec.dtype)
    return by_layer


def without_gain(speedups: Speedups) -> list[str]:
    """Return the layers whose speed-up is below `MIN_SPEEDUP` at every M of `TOKENS`."""
    return [name for name, at in speedups.items() if at is not None and max(at) < MIN_SPEEDUP]


def slower_from(speedups: Speedups) -> dict[int, list[str]]:
    """Return the layers that are slower than dense, by `MIN_SPEEDUP` and more, from an M of `TOKENS` to the largest.

    Layers `without_gain` are left out. The smallest M comes first.
    """
    slower: dict[int, list[str]] = {}
    for name, at in speedups.items():
        first = len(TOKENS)
        while at is not None and first and at[first - 1] * MIN_SPEEDUP <= 1:
            first -= 1
        if at is not None and max(at) >= MIN_SPEEDUP and first < len(TOKENS):
            slower.setdefault(TOKENS[first], []).append(name)
    return dict(sorted(slower.items()))
