"""`semisparse bench compare`: the plan's predictions beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from semisparse.bench.kernels import Measurement, fastest_kernels
from semisparse.bench.machines import Machine
from semisparse.bench.roofline import estimate_product


@dataclass(frozen=True)
class Comparison:
    """A measured time (microseconds) and the predicted one; ``error`` is predicted over measured, less 1."""

    layer: str
    n: int
    k: int
    m: int
    candidate: str
    kernel: str
    us: float
    predicted_us: float
    error: float


def compare(measurements: list[Measurement], machine: Machine) -> list[Comparison]:
    """Predict every measured product on a machine; of several kernels of a format, the fastest stands for it."""
    return [_compare(found, machine) for found in fastest_kernels(measurements)]


def _compare(found: Measurement, machine: Machine) -> Comparison:
    predicted, _ = estimate_product(found.candidate, found.m, found.n, found.k, getattr(torch, found.dtype), machine)
    us = predicted.seconds * 1e6
    label = found.candidate.label
    return Comparison(found.layer, found.n, found.k, found.m, label, found.kernel, found.us, us, us / found.us - 1)


def median_errors(comparisons: list[Comparison]) -> dict[str, float]:
    """Candidate -> the median size of its errors."""
    labels = dict.fromkeys(c.candidate for c in comparisons)
    return {label: median(abs(c.error) for c in comparisons if c.candidate == label) for label in labels}
