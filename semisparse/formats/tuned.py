"""Tuned tables: measured times of kernels, from `semisparse bench tune`. Some are shipped; a user's own override them.

A table is a CSV of one GPU. A row has the time of one kernel for a weight [N, K] and M tokens. A matmul is looked up by
the nearest measured pattern and shape; between two measured M, times are interpolated.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import get_type_hints

from semisparse.errors import InputError
from semisparse.formats.kernel import Problem
from semisparse.patterns import Pattern, parse_pattern
from semisparse.runtime.cache import cache_directory
from semisparse.runtime.device import device_facts

SHIPPED = Path(__file__).parent / "tables"

FAR_SHAPE = 2 * math.log(2)
"""Maximum |log(N / N')| + |log(K / K')| to a measured shape: both N and K may differ by a factor of 2."""

FAR_DENSITY = math.log(1.5)
"""Maximum |log(density / density')| to a measured pattern."""

ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
"""The dtype whose measurements are used if a dtype has none for a matmul."""


@dataclass(frozen=True)
class TunedRow:
    """A line of a table.

    Args:
        format: the format's name.
        pattern: the weight's pattern.
        variant: the values of the params that `Format.tuned_by` names, separated by spaces.
        dtype: dtype of x and of the weight that was packed.
        n: output features.
        k: input features.
        m: tokens.
        kernel: the kernel's name.
        us: microseconds of the matmul; the weight is read from device memory, not from L2.
        dense_us: microseconds of the dense matmul.
    """

    format: str
    pattern: str
    variant: str
    dtype: str
    n: int
    k: int
    m: int
    kernel: str
    us: float
    dense_us: float


def table_name(gpu: str) -> str:
    """Return the file name of a GPU's table, such as ``nvidia-h200.csv``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".csv"


def user_table(gpu: str) -> Path:
    """Return the path of the user's own table of a GPU."""
    return cache_directory() / "tuned" / table_name(gpu)


def read_table(path: Path) -> list[TunedRow]:
    """Read a table.

    Raises:
        InputError: a column is missing, or a value is not of its type or not positive; names the line.
    """
    types = get_type_hints(TunedRow)
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, record in enumerate(csv.DictReader(file), 2):
            try:
                row = TunedRow(**{name: types[name](record[name]) for name in types})
                parse_pattern(row.pattern)
                positive = all(0 < getattr(row, name) < math.inf for name in types if types[name] is not str)
            except (KeyError, TypeError, ValueError) as error:
                raise _unreadable(path, line, repr(error)) from error
            if not positive:
                raise _unreadable(path, line, "a number is not positive")
            rows.append(row)
    return rows


def _unreadable(path: Path, line: int, why: str) -> InputError:
    columns = ", ".join(field.name for field in fields(TunedRow))
    return InputError(f"{path}, line {line}: expected {columns}, {why}; delete the file or run bench tune again")


@cache
def _rows_of(gpu: str) -> Mapping[tuple[str, str, str], list[TunedRow]]:
    """Return a GPU's rows by format, variant and dtype. The user's rows replace shipped rows of equal keys."""
    rows: dict[tuple[object, ...], TunedRow] = {}
    for path in (SHIPPED / table_name(gpu), user_table(gpu)):
        for row in read_table(path) if path.exists() else ():
            rows[(row.format, row.pattern, row.variant, row.dtype, row.n, row.k, row.m, row.kernel)] = row
    grouped = defaultdict(list)
    for row in rows.values():
        grouped[row.format, row.variant, row.dtype].append(row)
    return dict(grouped)


@dataclass(frozen=True)
class Measured:
    """The time of a kernel for a matmul, from a table.

    Args:
        us: microseconds.
        dense_us: microseconds of the dense matmul, measured beside it.
    """

    us: float
    dense_us: float


def ranking(problem: Problem, tuned_by: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the kernels in `measured_times`, the fastest first.

    Args:
        problem: the matmul.
        tuned_by: as in `Format`.
    Raises:
        InputError: a table cannot be read.
    """
    times = measured_times(problem, tuned_by, device_facts(problem.device).name)
    return tuple(sorted(times, key=lambda name: times[name].us))


@lru_cache(maxsize=4096)
def measured_times(problem: Problem, tuned_by: tuple[str, ...], gpu: str) -> Mapping[str, Measured]:
    """Return the times, by kernel, that were measured on a GPU for the nearest pattern and shape.

    They are not scaled to the problem's own shape. The result is empty if nothing near was measured.

    Args:
        problem: the matmul.
        tuned_by: as in `Format`.
        gpu: the GPU's name, as the driver reports it.
    Raises:
        InputError: a table cannot be read.
    """
    variant = variant_of(problem.params, tuned_by)
    dtype = str(problem.dtype).removeprefix("torch.")
    table = _rows_of(gpu)
    for name in (dtype, ALIKE.get(dtype, dtype)):  # a dtype may have been timed for some M or patterns only
        rows = _covering(table.get((problem.spec.format, variant, name), []), problem.m)
        times = _interpolated(_nearest_shape(_nearest_pattern(rows, problem.pattern), problem), problem.m)
        if times:
            return times
    return {}


def variant_of(params: Mapping[str, object], tuned_by: Iterable[str]) -> str:
    """Return the value of the column ``variant`` for a weight with these params."""
    return " ".join(str(params.get(name, "")) for name in tuned_by)


def _covering(rows: list[TunedRow], m: int) -> list[TunedRow]:
    """Return the rows of weights that were measured for at most M tokens and for at least M."""
    spans = defaultdict(set)
    for row in rows:
        spans[row.pattern, row.n, row.k].add(row.m)
    return [row for row in rows if min(spans[row.pattern, row.n, row.k]) <= m <= max(spans[row.pattern, row.n, row.k])]


def _nearest_pattern(rows: list[TunedRow], pattern: Pattern) -> list[TunedRow]:
    """Return the rows of this pattern, else those of the pattern of its type with the nearest density, if near.

    Patterns with zeros and without are never near: they have different kernels.
    """
    exact = [row for row in rows if row.pattern == str(pattern)]
    if exact:
        return exact
    distances = {}
    for text in {row.pattern for row in rows}:
        other = parse_pattern(text)
        if type(other) is type(pattern) and (other.density == 1) == (pattern.density == 1):
            distances[text] = abs(math.log(max(other.density, 1e-9) / max(pattern.density, 1e-9)))
    near = min(distances, key=lambda text: (distances[text], text), default=None)
    return [row for row in rows if row.pattern == near] if near and distances[near] <= FAR_DENSITY else []


def _nearest_shape(rows: list[TunedRow], problem: Problem) -> list[TunedRow]:
    """Return the rows of the nearest shape, if near."""

    def distance(row: TunedRow) -> float:
        return abs(math.log(row.n / problem.n)) + abs(math.log(row.k / problem.k))

    near = min(rows, key=distance, default=None)
    if near is None or distance(near) > FAR_SHAPE:
        return []
    return [row for row in rows if (row.n, row.k) == (near.n, near.k)]


def _interpolated(rows: list[TunedRow], m: int) -> dict[str, Measured]:
    """Interpolate each kernel's time between the nearest measured M below and above; empty if one is missing."""
    measured = sorted({row.m for row in rows})
    below = max((value for value in measured if value <= m), default=None)
    above = min((value for value in measured if value >= m), default=None)
    if below is None or above is None:
        return {}
    first, last = ({row.kernel: row for row in rows if row.m == value} for value in (below, above))
    share = (m - below) / (above - below) if above > below else 0.0

    def between(kernel: str) -> Measured:
        low, high = first[kernel], last[kernel]
        return Measured((1 - share) * low.us + share * high.us, (1 - share) * low.dense_us + share * high.dense_us)

    return {kernel: between(kernel) for kernel in first.keys() & last.keys()}
