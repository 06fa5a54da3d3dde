"""`semisparse bench kernels`: every kernel on every shape, verified, timed, beside dense and beside its floor."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench.machines import Machine
from semisparse.bench.roofline import Candidate, estimate, random_weight
from semisparse.bench.shapes import LayerShape
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.errors import InputError, KernelError
from semisparse.formats.base import Packed, get_format
from semisparse.formats.kernel import Kernel, Product
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

CHECKED_ROWS = 64
"""Rows of the output compared with the reference; a row costs N * K operations in float32."""

TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Relative error of a whole output (norms): one rounding to the output's dtype, and float32 sums."""

ROUNDED_INPUT_TOLERANCE = {"tensor int8": 0.02, "tensor fp8": 0.05}
"""Where a kernel rounds x to 8 bits: a normal x errs by 0.9 % in int8 with a scale a row, 2.6 % in e4m3."""


@dataclass(frozen=True)
class Measurement:
    """One line of the CSV: a kernel on a shape, with the machine it ran on. Times in microseconds.

    ``floor_us`` is the roofline's time at the rates measured on the machine, launch not included; ``fraction`` the
    share of it that was reached; ``dense_us`` the baseline in the same run.
    """

    model: str
    layer: str
    n: int
    k: int
    count: int
    m: int
    dtype: str
    format: str
    pattern: str
    options: str
    kernel: str
    bits_per_weight: float
    bytes: float
    operations: float
    us: float
    low_us: float
    high_us: float
    floor_us: float
    fraction: float
    dense_us: float
    speedup: float
    error: float
    machine: str
    arch: str
    read_bandwidth: float
    peak_fp16: float
    software: str

    @property
    def candidate(self) -> Candidate:
        """What was measured."""
        return Candidate(self.format, self.pattern, json.loads(self.options) if self.options else {})


def fastest_kernels(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Keep, of the kernels that computed the same product in the same format, the fastest."""
    fastest: dict[tuple[int, int, int, str, str], Measurement] = {}
    for found in measurements:
        key = (found.n, found.k, found.m, found.dtype, found.candidate.label)
        if key not in fastest or found.us < fastest[key].us:
            fastest[key] = found
    return list(fastest.values())


@dataclass(frozen=True)
class Skipped:
    """A kernel that did not run, and why."""

    layer: str
    m: int
    candidate: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Setting:
    """What stays the same through a run."""

    model: str
    dtype: torch.dtype
    device: torch.device
    machine: Machine


def measure_layer(
    setting: Setting,
    layer: LayerShape,
    tokens: Iterable[int],
    candidates: Iterable[Candidate],
    leave_out: Collection[str] = (),
) -> Iterator[Measurement | Skipped]:
    """Measure every kernel of every candidate on one shape.

    Args:
        setting: the machine and the dtype.
        layer: the shape.
        tokens: values of M.
        candidates: the dense baseline first.
        leave_out: names of kernels that are not to be measured.
    Raises:
        KernelError: a kernel's output is wrong.
    """
    tokens = list(tokens)
    dense_us: dict[int, float] = {}
    for candidate in candidates:
        try:
            packed = _pack(setting, layer, candidate)
        except InputError as error:
            yield Skipped(layer.names, 0, candidate.label, "", str(error))
            continue
        copies = rotating_copies(packed, device_facts(setting.device).cache_bytes)
        for m in tokens:
            x = torch.randn(m, layer.k, device=setting.device).to(setting.dtype)
            for kernel in get_format(candidate.format).kernels:
                if kernel.name in leave_out:
                    continue
                reason = kernel.refusal(problem_of(x, packed))
                if reason:
                    yield Skipped(layer.names, m, candidate.label, kernel.name, reason)
                    continue
                found = _measure(setting, layer, candidate, kernel, copies, x, dense_us.get(m))
                if candidate.is_baseline:
                    dense_us.setdefault(m, found.us)
                yield found


def _pack(setting: Setting, layer: LayerShape, candidate: Candidate) -> Packed:
    pattern = parse_pattern(candidate.pattern)
    weight = random_weight(pattern, layer.n, layer.k, setting.dtype, setting.device)
    return get_format(candidate.format).pack(weight, pattern, **candidate.options).to(setting.device)


def _measure(
    setting: Setting,
    layer: LayerShape,
    candidate: Candidate,
    kernel: Kernel,
    copies: list[Packed],
    x: Tensor,
    dense_us: float | None,
) -> Measurement:
    packed = copies[0]
    problem = problem_of(x, packed)
    passes = get_format(candidate.format).cost(problem, packed.nbytes)
    tolerance = max(TOLERANCE[x.dtype], *(ROUNDED_INPUT_TOLERANCE.get(step.unit, 0.0) for step in passes))
    # The fewer outputs, the more the norm of their errors scatters: by 1 / sqrt(2 outputs); this is four times that.
    tolerance *= 1 + 3 / (min(len(x), CHECKED_ROWS) * layer.n) ** 0.5
    product = kernel.prepare(problem)
    error = _error(product, x, packed)
    if not error <= tolerance:
        raise KernelError(
            f"{candidate.label} {kernel.name} is wrong at M, N, K = {len(x)}, {layer.n}, {layer.k}: relative error "
            f"{error:.3g}, at most {tolerance:.3g} is right; it was not timed"
        )
    timing = time_calls([partial(product, x, copy, None) for copy in copies], setting.device)
    floor = estimate(passes, setting.machine)
    facts = device_facts(setting.device)
    dense = timing.us if dense_us is None else dense_us
    return Measurement(
        model=setting.model,
        layer=layer.names,
        n=layer.n,
        k=layer.k,
        count=layer.count,
        m=len(x),
        dtype=str(x.dtype).removeprefix("torch."),
        format=candidate.format,
        pattern=candidate.pattern,
        options=json.dumps(dict(candidate.options)) if candidate.options else "",
        kernel=kernel.name,
        bits_per_weight=packed.bits_per_weight,
        bytes=floor.bytes,
        operations=floor.operations,
        us=timing.us,
        low_us=timing.low_us,
        high_us=timing.high_us,
        floor_us=floor.floor_seconds * 1e6,
        fraction=floor.floor_seconds * 1e6 / timing.us,
        dense_us=dense,
        speedup=dense / timing.us,
        error=error,
        machine=facts.name,
        arch=facts.arch,
        read_bandwidth=setting.machine.bandwidth,
        peak_fp16=setting.machine.peaks["tensor fp16"],
        software=facts.driver,
    )


def _error(product: Product, x: Tensor, packed: Packed) -> float:
    """Error of some rows of the output, last ones included, against float32; NaN where one was not written.

    It is relative to these, or to what the terms of the sums would add up to if their signs were random, whichever is
    more: a single output may be next to nothing.
    """
    m, n = x.shape[0], packed.shape[0]
    poison = torch.full((m, n), torch.nan, dtype=x.dtype, device=x.device)
    del poison  # its memory is what the product's output most likely gets
    y = product(x, packed, None)
    rows = torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device=x.device).long()
    known, weight = x[rows].float(), packed.unpack().float()
    expected = F.linear(known, weight)
    size = torch.maximum(expected.norm(), F.linear(known.square(), weight.square()).sum().sqrt())
    return ((y[rows].float() - expected).norm() / size.clamp_min(torch.finfo(torch.float32).tiny)).item()
