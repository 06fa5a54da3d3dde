"""What a compression reports, computed from the config block of the compressed model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from semisparse import checkpoint
from semisparse.api.gains import slower_from, speedups_of, without_gain
from semisparse.api.targets import reached
from semisparse.bench.machines import Machine
from semisparse.formats.base import Packed, bytes_on_gpu


@dataclass(frozen=True)
class CompressionReport:
    """The result of a compression.

    Args:
        layers: per compressed layer its name, pattern, format, density, bits_per_weight, error (as in
            `compress.report.LayerReport`) and outcome: that of `LayerReport`, or ``kept ...`` if another tool's
            quantised values are kept.
        bytes_before: bytes of these layers' dense weights.
        bytes_after: bytes of their packed tensors, in files.
        bytes_on_gpu: about the bytes that these take on a GPU, the most of all GPUs.
        seconds: wall time of this run.
        dense: the linear weights that stay dense, each with its name, reason and bytes.
        dense_share: their share of the bytes of all linear weights of the dense model, 0 to 1.
        search: the result of the search: ``uniform_kl`` and ``kl`` (nats per token, on the tokens of the search),
            ``evaluations`` (candidates scored) and ``tokens`` (run through the model to score them all); with
            ``search=joint`` also ``uniform``, the best single choice for all layers, ``predicted``, totals relative
            to dense, and, if several models were tuned to compare them, ``tuned``, the KL of each, and ``taken``, the
            best one's key: ``search``, ``without zeros`` or a single choice. None without a search.
        tuning: per tuning stage of this run its name (``stage``), held-out loss (``before`` and ``after``), steps,
            failure, seconds and peak_bytes (of GPU memory).
        target: the requested targets, by key of `compress.recipe.TARGETS`; None without targets.
        reached: the model's values of the same keys: bits and size as stored, speed-ups as predicted. None without
            targets.
        rival: the dense low-bit model (`rivals.Rival`) with the lowest KL divergence of those with no more bits per
            weight than the compressed model, as a dict. None if its KL is not lower than the compressed model's, or if
            none was measured (no text, or ``search=joint``).
        no_gain: ``layers``: the names of the layers that `gains.without_gain` finds; ``machine``: the one that times
            are taken for: the recipe's ``gpu``; if that is ``auto`` and a target is a speed-up, this machine's GPU,
            else its CPU; without such a target the GPU that compressed. None if there are no such layers or no such
            machine in gpus.yaml.
        slower: ``machine``: as in ``no_gain``; ``from``: by number of tokens M, as text, the names of the layers that
            `gains.slower_from` finds. None if there are none.
    """

    layers: list[dict[str, Any]]
    bytes_before: int
    bytes_after: int
    bytes_on_gpu: int
    seconds: float
    dense: list[dict[str, Any]]
    dense_share: float
    search: dict[str, Any] | None
    tuning: list[dict[str, Any]]
    target: dict[str, float] | None = None
    reached: dict[str, float] | None = None
    rival: dict[str, Any] | None = None
    no_gain: dict[str, Any] | None = None
    slower: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, without those of the last five that are None or empty."""
        optional = ("target", "reached", "rival", "no_gain", "slower")
        return {key: value for key, value in asdict(self).items() if key not in optional or value}


def report_of(
    block: Mapping[str, Any], seconds: float, tuning: list[dict[str, Any]], machine: Machine | None
) -> CompressionReport:
    """Return the report of a compressed model.

    Args:
        block: the model's config block.
        seconds: wall time of this run.
        tuning: a report per tuning stage of this run.
        machine: the one that speed-ups are predicted for; None for no prediction.
    """
    layers = checkpoint.read_block(block)
    before = sum(packed.shape[0] * packed.shape[1] * packed.dtype.itemsize for packed in layers.values())
    after = sum(packed.nbytes for packed in layers.values())
    dense = block.get("dense", [])
    dense_bytes = sum(layer["bytes"] for layer in dense)
    search, target, values = block.get("search"), block["recipe"].get("targets"), None
    if target and search:
        dtype = next((packed.dtype for packed in layers.values()), torch.bfloat16)
        values = reached(target, {**search["predicted"], "bits": after / before}, dtype)
    no_gain, slower = _gains(layers, machine) if machine else (None, None)
    return CompressionReport(
        layers=[_row(name, packed, block["layers"][name]) for name, packed in layers.items()],
        bytes_before=before,
        bytes_after=after,
        bytes_on_gpu=sum(bytes_on_gpu(packed) for packed in layers.values()),
        seconds=seconds,
        dense=dense,
        dense_share=dense_bytes / (dense_bytes + before),
        search=search,
        tuning=tuning,
        target=target,
        reached=values,
        rival=block.get("rival"),
        no_gain=no_gain,
        slower=slower,
    )


def bits_per_weight(block: Mapping[str, Any]) -> float:
    """Return the stored bits per weight of all packed layers of a config block."""
    layers = checkpoint.read_block(block).values()
    return 8 * sum(packed.nbytes for packed in layers) / sum(packed.shape[0] * packed.shape[1] for packed in layers)


def _row(name: str, packed: Packed, entry: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: entry[key] for key in ("pattern", "format", "density", "error", "outcome")}
    return {"name": name, **shown, "bits_per_weight": packed.bits_per_weight}


def _gains(layers: Mapping[str, Packed], machine: Machine) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return `CompressionReport.no_gain` and `CompressionReport.slower`."""
    speedups = speedups_of(layers, machine)
    never, slower = without_gain(speedups), slower_from(speedups)
    return (
        {"machine": machine.name, "layers": never} if never else None,
        {"machine": machine.name, "from": {str(m): names for m, names in slower.items()}} if slower else None,
    )
