"""The machines that `plan` knows: the GPUs in gpus.yaml, and this machine's own, measured."""

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
"""Fixed time of a call of torch's linear on a CPU."""


@dataclass(frozen=True)
class Machine:
    """A machine in the roofline model.

    Args:
        name: the vendor's name.
        source: where the figures come from.
        bandwidth: bytes per second that a large kernel reads.
        peaks: operations per second that a large matmul reaches, by unit.
        kernel_seconds: fixed time per kernel: launch, ramp-up and tail.
        device: ``cuda`` or ``cpu``.
        capability: compute capability (major, minor) of a GPU; (0, 0) for a CPU.
    """

    name: str
    source: str
    bandwidth: float
    peaks: Mapping[str, float]
    kernel_seconds: float
    device: str = "cuda"
    capability: tuple[int, int] = (0, 0)


def find_machine(name: str) -> Machine:
    """Return a machine by name.

    Args:
        name: a key of gpus.yaml, or a device of this machine, which is measured: ``cuda``, ``cpu``, or ``auto`` for the
            GPU if there is one.
    Raises:
        InputError: the name is unknown; lists the known ones.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "cuda"):
        return _machine_here(name)
    gpus = _data()["gpus"]
    if name not in gpus:
        raise InputError(f"unknown GPU {name!r}; known: {', '.join(gpus)}, cpu, auto")
    return _machine_from_data(gpus[name])


def known_gpu(name: str) -> Machine | None:
    """Return the GPU of gpus.yaml whose device name, as torch gives it, is ``name``, or None; nothing is measured."""
    return next((_machine_from_data(gpu) for gpu in _data()["gpus"].values() if gpu["name"] == name), None)


def _machine_here(device: str) -> Machine:
    """Measure this machine's GPU or CPU."""
    rates = measured_rates(device)
    fixed = _data()["kernel_us"] * 1e-6 if device == "cuda" else CPU_CALL_SECONDS
    facts, source = device_facts(device), "measured on this machine"
    return Machine(facts.name, source, rates.read_bandwidth, rates.peaks, fixed, device, facts.capability)


def _machine_from_data(gpu: Mapping[str, Any]) -> Machine:
    """Return a GPU of gpus.yaml with its measured rates, else the data sheet's times the fraction an H200 reaches."""
    data = _data()
    measured = gpu.get("measured")
    if measured:
        bandwidth, peaks, source = measured["bandwidth"], measured["peaks"], measured["source"]
    else:
        reached = data["reached"]
        bandwidth = gpu["bandwidth"] * reached["bandwidth"]
        peaks = {unit: peak * reached["peaks"][unit] for unit, peak in gpu["peaks"].items()}
        source = f"{gpu['source']}, times the fraction that an H200 reaches"
    peaks = {unit: peak * 1e12 for unit, peak in peaks.items()}
    fixed, (major, minor) = data["kernel_us"] * 1e-6, gpu["capability"]
    return Machine(gpu["name"], source, bandwidth * 1e12, peaks, fixed, capability=(major, minor))


@cache
def _data() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text())
