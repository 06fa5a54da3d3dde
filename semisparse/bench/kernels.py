"""`semisparse bench kernels`: verify and time every kernel on every shape, beside dense and the roofline floor."""

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
"""Rows of y compared with the reference. The reference takes N * K operations per row in float32."""

TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""Tolerated relative error (of norms) for one rounding to the output's dtype and float32 accumulation."""

ROUNDED_INPUT_TOLERANCE = {"tensor int8": 0.02, "tensor fp8": 0.05}
"""Tolerated relative error by unit for kernels that round x to 8 bits.

A normally distributed x has an error of 0.9 % in int8 with one scale per row, and 2.6 % in e4m3.
"""


@dataclass(frozen=True)
class Measurement:
    """A kernel's time on one shape: a line of the CSV. Times are in microseconds.

    ``floor_us`` is the roofline's time at the machine's measured rates, without launch; ``fraction`` is floor_us / us;
    ``dense_us`` is the baseline's time in the same run; ``low_us`` and ``high_us`` are the 10th and 90th percentile.
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
        """The format, pattern and options that were measured."""
        return Candidate(self.format, self.pattern, json.loads(self.options) if self.options else {})


def fastest_kernels(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Keep only the fastest kernel per shape, M, dtype and candidate."""
    fastest: dict[tuple[int, int, int, str, str], Measurement] = {}
    for row in measurements:
        key = (row.n, row.k, row.m, row.dtype, row.candidate.label)
        if key not in fastest or row.us < fastest[key].us:
            fastest[key] = row
    return list(fastest.values())


@dataclass(frozen=True)
class Skipped:
    """A kernel that was not measured, and the reason."""

    layer: str
    m: int
    candidate: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Setup:
    """What all measurements of a run have in common: model, dtype, device and its rates."""

    model: str
    dtype: torch.dtype
    device: torch.device
    machine: Machine


def measure_layer(
    setup: Setup,
    layer: LayerShape,
    tokens: Iterable[int],
    candidates: Iterable[Candidate],
    exclude: Collection[str] = (),
) -> Iterator[Measurement | Skipped]:
    """Verify and time every kernel of every candidate on one shape.

    Args:
        setup: the model, dtype, device and machine.
        layer: the shape.
        tokens: values of M.
        candidates: the dense baseline first.
        exclude: names of kernels that are not measured.
    Raises:
        KernelError: a kernel's output is wrong.
    """
    tokens = list(tokens)
    dense_us: dict[int, float] = {}
    for candidate in candidates:
        try:
            packed = _pack(setup, layer, candidate)
        except InputError as error:
            yield Skipped(layer.names, 0, candidate.label, "", str(error))
            continue
        copies = rotating_copies(packed, device_facts(setup.device).cache_bytes)
        for m in tokens:
            x = torch.randn(m, layer.k, device=setup.device).to(setup.dtype)
            for kernel in get_format(candidate.format).kernels:
                if kernel.name in exclude:
                    continue
                reason = kernel.refusal(problem_of(x, packed))
                if reason:
                    yield Skipped(layer.names, m, candidate.label, kernel.name, reason)
                    continue
                measurement = _measure(setup, layer, candidate, kernel, copies, x, dense_us.get(m))
                if candidate.is_baseline:
                    dense_us.setdefault(m, measurement.us)
                yield measurement


def _pack(setup: Setup, layer: LayerShape, candidate: Candidate) -> Packed:
    pattern = parse_pattern(candidate.pattern)
    weight = random_weight(pattern, layer.n, layer.k, setup.dtype, setup.device)
    return get_format(candidate.format).pack(weight, pattern, **candidate.options).to(setup.device)


def _measure(
    setup: Setup,
    layer: LayerShape,
    candidate: Candidate,
    kernel: Kernel,
    copies: list[Packed],
    x: Tensor,
    dense_us: float | None,
) -> Measurement:
    """Verify and time one kernel. ``dense_us`` is None for the baseline itself."""
    packed = copies[0]
    problem = problem_of(x, packed)
    passes = get_format(candidate.format).cost(problem, packed.nbytes)
    tolerance = max(TOLERANCE[x.dtype], *(ROUNDED_INPUT_TOLERANCE.get(step.unit, 0.0) for step in passes))
    # The norm of few errors scatters by 1 / sqrt(2 * outputs). Some four times that is tolerated.
    tolerance *= 1 + 3 / (min(len(x), CHECKED_ROWS) * layer.n) ** 0.5
    matmul = kernel.prepare(problem)
    error = _relative_error(matmul, x, packed)
    if not error <= tolerance:
        raise KernelError(
            f"{candidate.label} {kernel.name} is wrong at M, N, K = {len(x)}, {layer.n}, {layer.k}: relative error "
            f"{error:.3g}, at most {tolerance:.3g} is right; it was not timed"
        )
    timing = time_calls([partial(matmul, x, copy, None) for copy in copies], setup.device)
    floor = estimate(passes, setup.machine)
    facts = device_facts(setup.device)
    dense = timing.us if dense_us is None else dense_us
    return Measurement(
        model=setup.model,
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
        read_bandwidth=setup.machine.bandwidth,
        peak_fp16=setup.machine.peaks["tensor fp16"],
        software=facts.driver,
    )


def _relative_error(matmul: Product, x: Tensor, packed: Packed) -> float:
    """Return the relative error of `CHECKED_ROWS` rows of y, the last one included, against float32.

    The error is ``||y - expected|| / size``. The size is ``||expected||`` or, if that is larger, the norm that expected
    would have if the terms of its sums had random signs. The latter is for a single output, which may be close to zero.
    The result is NaN if an output was not written.
    """
    m, n = x.shape[0], packed.shape[0]
    poison = torch.full((m, n), torch.nan, dtype=x.dtype, device=x.device)
    del poison  # the allocator most likely gives its memory to y, so that outputs that are not written are NaN
    y = matmul(x, packed, None)
    rows = torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device=x.device).long()
    checked, weight = x[rows].float(), packed.unpack().float()
    expected = F.linear(checked, weight)
    size = torch.maximum(expected.norm(), F.linear(checked.square(), weight.square()).sum().sqrt())
    return ((y[rows].float() - expected).norm() / size.clamp_min(torch.finfo(torch.float32).tiny)).item()
