"""`semisparse bench compare`: the roofline model's predictions beside measured times."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from semisparse.bench.kernels import Measurement, fastest_kernels
from semisparse.bench.machines import Machine
from semisparse.bench.roofline import estimate_matmul


@dataclass(frozen=True)
class Comparison:
    """A measured time and the predicted one, in microseconds. ``error`` is predicted / measured - 1."""

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
    """Compare every measured matmul with the time that the roofline model predicts for it.

    Args:
        measurements: measured on one machine. Only the fastest kernel per matmul and candidate is compared.
        machine: the machine whose rates the prediction uses.
    """
    return [_compare(measurement, machine) for measurement in fastest_kernels(measurements)]


def _compare(row: Measurement, machine: Machine) -> Comparison:
    predicted, _ = estimate_matmul(row.candidate, row.m, row.n, row.k, getattr(torch, row.dtype), machine)
    us = predicted.seconds * 1e6
    return Comparison(row.layer, row.n, row.k, row.m, row.candidate.label, row.kernel, row.us, us, us / row.us - 1)


def median_errors(comparisons: list[Comparison]) -> dict[str, float]:
    """Return the median absolute error per candidate label."""
    labels = dict.fromkeys(c.candidate for c in comparisons)
    return {label: median(abs(c.error) for c in comparisons if c.candidate == label) for label in labels}
