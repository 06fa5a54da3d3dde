"""`semisparse plan`: the predicted speed-up of each format on a machine, before anything is compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from semisparse.bench.machines import Machine
from semisparse.bench.roofline import Candidate, Estimate, estimate_matmul, problem_on
from semisparse.bench.shapes import LayerShape
from semisparse.errors import InputError
from semisparse.formats.base import get_format
from semisparse.patterns import parse_pattern

MIN_SPEEDUP = 1.05
"""Predicted speed-ups below this count as none: measured times vary by a few percent."""

MORE_MEMORY = 1.02
"""Ratio of the bits per weight in a GPU's memory to those in a file, above which `plan` has a sentence about it."""

BOUND = {"memory": "reading the weights", "arithmetic": "arithmetic", "fixed time": "a kernel's fixed time"}
"""What bounds a dense matmul, in words, by `Estimate.bound`."""


@dataclass(frozen=True)
class Row:
    """The prediction for one candidate on one layer shape and M.

    The model has ``layer.count`` such layers. A forward pass of M tokens uses all of them, or of experts those that the
    router chooses: on average ``layer.used(m)``, each with ``layer.tokens(m)`` tokens.

    Args:
        layer: the layer shape.
        m: tokens of the forward pass.
        candidate: a format with its pattern and options.
        bits_per_weight: in a file.
        estimate: the predicted time of one such layer, and what bounds it.
        speedup: over the dense layer.
        gpu_bits: bits per weight in the GPU's memory.
    """

    layer: LayerShape
    m: int
    candidate: Candidate
    bits_per_weight: float
    estimate: Estimate
    speedup: float
    gpu_bits: float

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            **asdict(self.layer),
            "m": self.m,
            "format": self.candidate.format,
            "pattern": self.candidate.pattern,
            "options": dict(self.candidate.options),
            "bits_per_weight": self.bits_per_weight,
            "gpu_bits_per_weight": self.gpu_bits,
            "bytes": self.estimate.bytes,
            "operations": self.estimate.operations,
            "intensity": self.estimate.operations / self.estimate.bytes,
            "bound": self.estimate.bound,
            "strategy": self.estimate.strategy,
            "us": self.estimate.seconds * 1e6,
            "speedup": self.speedup,
            "measured": self.estimate.measured,
        }


@dataclass(frozen=True)
class Plan:
    """The predictions for a model on a machine.

    Args:
        machine: the machine whose rates are used.
        rows: one prediction per layer shape, M and candidate.
        left_out: candidate label -> why it is not in the rows.
    """

    machine: Machine
    rows: list[Row]
    left_out: dict[str, str]

    def totals(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Return (M, candidate label) -> (seconds of all layers that M tokens use, speed-up over dense)."""
        seconds: dict[tuple[int, str], float] = {}
        for row in self.rows:
            key = (row.m, row.candidate.label)
            seconds[key] = seconds.get(key, 0.0) + row.layer.used(row.m) * row.estimate.seconds
        dense = {row.m: row.candidate.label for row in self.rows if row.candidate.is_baseline}
        return {(m, label): (time, seconds[m, dense[m]] / time) for (m, label), time in seconds.items()}

    def best(self) -> dict[tuple[str, int], Row]:
        """Return (layer, M) -> the fastest candidate, or dense if no speed-up is above `MIN_SPEEDUP`.

        Dense is the first of the candidates in `rows`.
        """
        best: dict[tuple[str, int], Row] = {}
        for row in self.rows:
            key = (row.layer.label, row.m)
            if key not in best or row.speedup > max(best[key].speedup, MIN_SPEEDUP):
                best[key] = row
        return best

    def sentences(self) -> list[str]:
        """Return one sentence per M: what bounds the dense matmul, and whether sparsity pays.

        Then one per candidate that gains at no M, and one per candidate that takes more memory on a GPU than in a file.
        """
        by_tokens = [self._sentence(m) for m in dict.fromkeys(row.m for row in self.rows)]
        return [*by_tokens, *self._without_gain(), *self._memory()]

    def _memory(self) -> list[str]:
        """Return a sentence per candidate that takes more memory on a GPU than in a file."""
        if self.machine.device != "cuda":
            return []
        more = {row.candidate.label: row for row in self.rows if row.gpu_bits > MORE_MEMORY * row.bits_per_weight}
        return [
            f"{label} takes about {row.gpu_bits:.1f} bits per weight in this GPU's memory, "
            f"{row.bits_per_weight:.1f} in a file."
            for label, row in more.items()
        ]

    def _without_gain(self) -> list[str]:
        """Return a sentence per candidate whose speed-up on some layer is below `MIN_SPEEDUP` at every M."""
        fastest: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if not row.candidate.is_baseline:
                speedups = fastest.setdefault(row.candidate.label, {})
                speedups[row.layer.label] = max(row.speedup, speedups.get(row.layer.label, 0.0))
        lost = {
            label: [layer for layer, speedup in speedups.items() if speedup < MIN_SPEEDUP]
            for label, speedups in fastest.items()
        }
        return [
            f"{label} gains no speed here at any of these numbers of tokens: {'; '.join(layers)}."
            for label, layers in lost.items()
            if layers
        ]

    def _sentence(self, m: int) -> str:
        rows = [row for row in self.rows if row.m == m]
        largest = max((row for row in rows if row.candidate.is_baseline), key=lambda row: row.layer.n * row.layer.k)
        sparse = sorted({row.candidate.label for row in rows if parse_pattern(row.candidate.pattern).density < 1})
        start = f"M = {m:,}: the dense matmul is bound by {BOUND[largest.estimate.bound]}"
        if not sparse:
            return f"{start}; no sparse format was requested or can be predicted."
        speedups = {label: speedup for (tokens, label), (_, speedup) in sorted(self.totals().items()) if tokens == m}
        label = max(sparse, key=lambda name: speedups[name])
        speedup = speedups[label]
        # Without zeros, but possibly quantised: the rival that a sparse format has to beat.
        rival = max((name for name in speedups if name not in sparse), key=lambda name: speedups[name])
        if speedup < MIN_SPEEDUP:
            instead = "Keep it dense"
            if speedups[rival] >= MIN_SPEEDUP:
                instead = f"{rival}, without zeros, may be up to {speedups[rival]:.2f} times as fast"
            return f"{start}; sparsity will not pay: the best, {label}, reaches {speedup:.2f}. {instead}."
        beside = f", {rival} up to {speedups[rival]:.2f} without zeros" if speedups[rival] >= MIN_SPEEDUP else ""
        return f"{start}; {label} may be up to {speedup:.2f} times as fast{beside}."


def make_plan(
    layers: list[LayerShape], tokens: list[int], candidates: list[Candidate], dtype: torch.dtype, machine: Machine
) -> Plan:
    """Predict every candidate on every layer shape and M.

    Args:
        layers: the layer shapes.
        tokens: values of M.
        candidates: the dense baseline first.
        dtype: dtype of weights and activations.
        machine: the machine whose rates are used.
    """
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for layer in layers:
        for m in tokens:
            dense, _ = _estimate(candidates[0], layer, m, dtype, machine)
            for candidate in candidates:
                try:
                    predicted, bits = _estimate(candidate, layer, m, dtype, machine)
                except InputError as error:
                    left_out[candidate.label] = str(error)
                    continue
                _, weight_bytes, _ = problem_on(candidate, m, layer.n, layer.k, dtype, machine)
                here = 8 * weight_bytes / (layer.n * layer.k)
                rows.append(Row(layer, m, candidate, bits, predicted, dense.seconds / predicted.seconds, here))
    # Without an estimate for one of the layers a candidate has no total, so all its rows are dropped.
    rows = [row for row in rows if row.candidate.label not in left_out]
    return Plan(machine, rows, left_out)


def _estimate(
    candidate: Candidate, layer: LayerShape, m: int, dtype: torch.dtype, machine: Machine
) -> tuple[Estimate, float]:
    """Return the estimate of one matmul of a layer when the model takes M tokens, and the bits per weight.

    Where one launch computes all used experts, ``seconds`` has this matmul's share of the launch; ``bound`` is still
    that of a launch of its own.
    """
    predicted, bits = estimate_matmul(candidate, layer.tokens(m), layer.n, layer.k, dtype, machine)
    if candidate.is_baseline or (machine.device == "cuda" and get_format(candidate.format).experts is not None):
        # One launch computes a linear layer of all used experts: torch's grouped matmul, or the format's kernel for
        # experts. Other formats take a launch per used expert.
        launches = layer.count / layer.experts
        saved = 1 - launches / layer.used(m)  # per used expert, in launches
        predicted = replace(predicted, seconds=predicted.seconds - saved * machine.kernel_seconds)
    return predicted, bits
