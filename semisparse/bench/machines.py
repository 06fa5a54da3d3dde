"""The machines `plan` knows: cards from gpus.yaml, and whatever is measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from semisparse.errors import InputError
from semisparse.runtime.device import device_facts
from semisparse.runtime.measure import measured_rates

CPU_CALL_SECONDS = 5e-6
"""A call of torch's linear on a CPU, beside its work."""


@dataclass(frozen=True)
class Machine:
    """What the roofline needs of a machine.

    Args:
        name: as its vendor writes it.
        source: where the figures come from.
        bandwidth: bytes a second that a large kernel reads.
        peaks: operations a second that a large product reaches, by unit.
        kernel_seconds: fixed time of a kernel: launch, ramp-up and tail.
        device: ``cuda`` or ``cpu``.
    """

    name: str
    source: str
    bandwidth: float
    peaks: Mapping[str, float]
    kernel_seconds: float
    device: str = "cuda"


def find_machine(name: str) -> Machine:
    """Look a machine up.

    Args:
        name: a key of gpus.yaml; ``cpu`` for this machine's CPU and ``auto`` for its GPU if it has one, both measured.
    Raises:
        InputError: there is no such machine; lists the known ones.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "cuda"):
        return _machine_here(name)
    cards = _data()["gpus"]
    if name not in cards:
        raise InputError(f"unknown GPU {name!r}; known: {', '.join(cards)}, cpu, auto")
    return _machine_from_data(cards[name])


def _machine_here(device: str) -> Machine:
    rates = measured_rates(device)
    fixed = _data()["kernel_us"] * 1e-6 if device == "cuda" else CPU_CALL_SECONDS
    name = device_facts(device).name
    return Machine(name, "measured on this machine", rates.read_bandwidth, rates.peaks, fixed, device)


def _machine_from_data(card: Mapping[str, Any]) -> Machine:
    data = _data()
    measured = card.get("measured")
    if measured:
        bandwidth, peaks, source = measured["bandwidth"], measured["peaks"], measured["source"]
    else:
        reached = data["reached"]
        bandwidth = card["bandwidth"] * reached["bandwidth"]
        peaks = {unit: peak * reached["peaks"][unit] for unit, peak in card["peaks"].items()}
        source = f"{card['source']}, times the share an H200 reaches"
    peaks = {unit: peak * 1e12 for unit, peak in peaks.items()}
    return Machine(card["name"], source, bandwidth * 1e12, peaks, data["kernel_us"] * 1e-6)


@cache
def _data() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text())
