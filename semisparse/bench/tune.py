"""Time every kernel of some formats, for the table by which matmuls choose a kernel (`semisparse.formats.tuned`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from semisparse.bench import timing
from semisparse.bench.kernels import Measurement, Setup, measure_layer
from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import LayerShape
from semisparse.bench.table import write_csv
from semisparse.errors import InputError
from semisparse.formats.base import get_format
from semisparse.formats.kernel import Problem, bucket_of
from semisparse.formats.product import structure_of
from semisparse.formats.tuned import TunedRow, read_table, user_table, variant_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

GPU_SECONDS = 0.01
"""Seconds of replays per kernel, in place of `timing.GPU_SECONDS`. Slow ones take `timing.FEWEST_REPLAYS` replays."""


def compiling_processes() -> ProcessPoolExecutor:
    """Return a process per CPU core, in which `tune` compiles: that takes longer than measuring."""
    return ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))


def tune(
    setup: Setup,
    shapes: Sequence[LayerShape],
    candidates: Sequence[Candidate],
    tokens: Sequence[int],
    pool: Executor,
) -> Iterator[list[TunedRow]]:
    """Verify and time the kernels of every candidate except the dense baseline, which is the first candidate.

    Args:
        setup: the dtype, device and machine.
        shapes: N and K of the weights.
        candidates: how they are stored, the baseline first.
        tokens: values of M.
        pool: where kernels are compiled, as in `compiling_processes`; it is idle while kernels are timed.
    Yields:
        The rows of one shape and candidate.
    Raises:
        KernelError: a kernel's output is wrong.
    """
    before, timing.GPU_SECONDS = timing.GPU_SECONDS, GPU_SECONDS
    try:
        for shape in shapes:
            _compile(setup, shape, candidates, tokens, pool)
            measured = (row for row in measure_layer(setup, shape, tokens, candidates) if isinstance(row, Measurement))
            for _, rows in groupby(measured, lambda row: row.candidate.label):
                timed = [_row(row) for row in rows if not row.candidate.is_baseline]
                if timed:
                    yield timed
    finally:
        timing.GPU_SECONDS = before


def unmeasured(
    candidates: Sequence[Candidate], shape: LayerShape, dtype: torch.dtype, tokens: Iterable[int], path: Path
) -> list[Candidate]:
    """Return the dense baseline and the candidates that a table lacks for some M; nothing if it lacks none of them.

    Args:
        candidates: the dense baseline first.
        shape: N and K.
        dtype: dtype of the activations.
        tokens: values of M.
        path: the table, which may be absent.
    Raises:
        InputError: the table cannot be read.
    """
    present = {_matmul_of(row) for row in read_table(path)} if path.exists() else set()
    name = str(dtype).removeprefix("torch.")

    def lacks(candidate: Candidate) -> bool:
        keys = (candidate.format, str(parse_pattern(candidate.pattern)))
        variant = variant_of(candidate.options, get_format(candidate.format).tuned_by)
        return any((*keys, variant, name, shape.n, shape.k, m) not in present for m in tokens)

    left = [candidate for candidate in candidates if not candidate.is_baseline and lacks(candidate)]
    return [candidates[0], *left] if left else []


def _compile(
    setup: Setup, shape: LayerShape, candidates: Iterable[Candidate], tokens: Iterable[int], pool: Executor
) -> None:
    """Compile all kernels of a shape, so that the cache on disk has them when they are timed."""
    jobs = []
    for candidate in candidates:
        form, pattern = get_format(candidate.format), parse_pattern(candidate.pattern)
        try:
            # Only a packed weight has a structure. measure_layer packs the weight again.
            weight = random_weight(pattern, shape.n, shape.k, setup.dtype, setup.device)
            packed = form.pack(weight, pattern, **candidate.options).to(setup.device)
        except InputError:
            continue  # measure_layer says why
        for m in tokens:
            problem = Problem(bucket_of(m), structure_of(packed.spec), setup.dtype, setup.device)
            jobs += [
                pool.submit(_compile_kernel, form.name, kernel.name, problem)
                for kernel in form.kernels
                if kernel.refusal(problem) is None
            ]
    for job in jobs:
        job.result()


def _compile_kernel(format_name: str, kernel_name: str, problem: Problem) -> None:
    next(kernel for kernel in get_format(format_name).kernels if kernel.name == kernel_name).prepare(problem)


def _row(measured: Measurement) -> TunedRow:
    form = get_format(measured.format)
    options = measured.candidate.options
    return TunedRow(
        format=measured.format,
        pattern=str(parse_pattern(measured.pattern)),
        variant=variant_of(options, form.tuned_by),
        dtype=measured.dtype,
        n=measured.n,
        k=measured.k,
        m=measured.m,
        kernel=measured.kernel,
        us=round(measured.us, 2),
        dense_us=round(measured.dense_us, 2),
    )


def add_to_table(path: Path, rows: Sequence[TunedRow]) -> None:
    """Add rows to a table, in place of its rows for the same matmuls.

    Raises:
        InputError: the existing table cannot be read.
    """
    measured = {_matmul_of(row) for row in rows}
    kept = [row for row in read_table(path) if _matmul_of(row) not in measured] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, [*kept, *rows])


def _matmul_of(row: TunedRow) -> tuple[str | int, ...]:
    return row.format, row.pattern, row.variant, row.dtype, row.n, row.k, row.m


def of_kinds(candidates: Iterable[Candidate], kinds: Sequence[str] | None) -> list[Candidate]:
    """Keep the candidates without pack options, and those with an option value in ``kinds``; all if that is None.

    Raises:
        InputError: no candidate has one of the values; lists the known ones.
    """
    candidates = list(candidates)
    if kinds is None:
        return candidates
    known = {str(value) for candidate in candidates for value in candidate.options.values()}
    if not set(kinds) <= known:
        unknown = ", ".join(sorted(set(kinds) - known))
        raise InputError(f"no format has the variant {unknown}; known here: {', '.join(sorted(known)) or 'none'}")
    return [c for c in candidates if not c.options or set(kinds) & {str(value) for value in c.options.values()}]


def users_table(device: torch.device) -> Path:
    """Return the path of the user's table for a GPU.

    Raises:
        InputError: the device is no GPU.
    """
    if device.type != "cuda":
        raise InputError(f"tables are for GPUs: bench tune was given {device.type}; run it on a machine with one")
    return user_table(device_facts(device).name)
