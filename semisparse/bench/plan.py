"""`semisparse plan`: what each format should gain on a machine, before anything is compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from semisparse.bench.machines import Machine
from semisparse.bench.roofline import Candidate, Estimate, estimate_product
from semisparse.bench.shapes import LayerShape
from semisparse.errors import InputError

WORTH_IT = 1.05
"""A predicted speed-up below this is not told from none: times drift by a few percent."""


@dataclass(frozen=True)
class Row:
    """One candidate on one layer of a shape, of which the model has ``layer.count``, at one number of tokens."""

    layer: LayerShape
    m: int
    candidate: Candidate
    bits_per_weight: float
    estimate: Estimate
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        """Give plain JSON."""
        return {
            **asdict(self.layer),
            "m": self.m,
            "format": self.candidate.format,
            "pattern": self.candidate.pattern,
            "options": dict(self.candidate.options),
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.estimate.bytes,
            "operations": self.estimate.operations,
            "intensity": self.estimate.operations / self.estimate.bytes,
            "bound": self.estimate.bound,
            "strategy": self.estimate.strategy,
            "us": self.estimate.seconds * 1e6,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Plan:
    """What was predicted, what could not be, and what to make of it."""

    machine: Machine
    rows: list[Row]
    left_out: dict[str, str]
    """Candidate -> the reason why it is not in the rows."""

    def totals(self) -> dict[tuple[int, str], tuple[float, float]]:
        """(M, candidate) -> seconds of all layers of the model, and their speed-up over dense."""
        seconds: dict[tuple[int, str], float] = {}
        for row in self.rows:
            key = (row.m, row.candidate.label)
            seconds[key] = seconds.get(key, 0.0) + row.layer.count * row.estimate.seconds
        dense = {row.m: row.candidate.label for row in self.rows if row.candidate.is_baseline}
        return {(m, label): (time, seconds[m, dense[m]] / time) for (m, label), time in seconds.items()}

    def best(self) -> dict[tuple[str, int], Row]:
        """(layer, M) -> the fastest candidate; dense unless it is beaten by more than times drift."""
        found: dict[tuple[str, int], Row] = {}
        for row in self.rows:
            key = (f"{row.layer.names} {row.layer.n},{row.layer.k}".strip(), row.m)
            if key not in found or row.speedup > max(found[key].speedup, WORTH_IT):
                found[key] = row
        return found

    def sentences(self) -> list[str]:
        """Say in words whether sparsity pays, one sentence for each number of tokens."""
        return [self._sentence(m) for m in dict.fromkeys(row.m for row in self.rows)]

    def _sentence(self, m: int) -> str:
        rows = [row for row in self.rows if row.m == m]
        largest = max((row for row in rows if row.candidate.is_baseline), key=lambda row: row.layer.n * row.layer.k)
        sparse = sorted({row.candidate.label for row in rows if row.candidate.pattern != largest.candidate.pattern})
        start = f"M = {m:,}: the dense product is bound by {BOUND[largest.estimate.bound]}"
        if not sparse:
            return f"{start}; no sparse format was asked for or could be planned."
        gains = {label: gain for (tokens, label), (_, gain) in sorted(self.totals().items()) if tokens == m}
        label = max(sparse, key=lambda name: gains[name])
        gain = gains[label]
        if gain >= WORTH_IT:
            rounded = max((name for name in gains if name not in sparse), key=lambda name: gains[name])
            rival = f", {rounded} up to {gains[rounded]:.2f} without zeros" if gains[rounded] >= WORTH_IT else ""
            return f"{start}; {label} may gain up to {gain:.2f}{rival}."
        return f"{start}; {WHY_NOT[largest.estimate.bound]}: the best, {label}, stands at {gain:.2f}. Keep it dense."


BOUND = {"memory": "reading the weights", "arithmetic": "arithmetic", "fixed time": "a kernel's fixed time"}

WHY_NOT = {
    "memory": "sparsity will not pay, because no format here reads enough less",
    "arithmetic": "sparsity will not pay, because no format here computes enough less",
    "fixed time": "sparsity will not pay, because the layers are too small",
}


def make_plan(
    layers: list[LayerShape], tokens: list[int], candidates: list[Candidate], dtype: torch.dtype, machine: Machine
) -> Plan:
    """Predict every candidate on every layer shape at every number of tokens.

    Args:
        layers: the shapes.
        tokens: values of M.
        candidates: the dense baseline first.
        dtype: of weights and activations.
        machine: whose rates are used.
    """
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for layer in layers:
        for m in tokens:
            dense, _ = estimate_product(candidates[0], m, layer.n, layer.k, dtype, machine)
            for candidate in candidates:
                try:
                    found, bits = estimate_product(candidate, m, layer.n, layer.k, dtype, machine)
                except InputError as reason:
                    left_out[candidate.label] = str(reason)
                    continue
                rows.append(Row(layer, m, candidate, bits, found, dense.seconds / found.seconds))
    # A candidate that cannot store one layer has no total: leave it out whole.
    rows = [row for row in rows if row.candidate.label not in left_out]
    return Plan(machine, rows, left_out)
