"""Which kernel was measured to be the fastest: tables that `semisparse bench tune` makes, shipped ones and the user's.

A table is a CSV of one GPU. Its rows tell how long each kernel takes for a weight [N, K] and M tokens. A product is
looked up by the nearest measured pattern and shape; between two measured M, times are interpolated.
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
"""|log(N / N')| + |log(K / K')| above which a measured shape says nothing: each may be half or double."""

FAR_DENSITY = math.log(1.5)
"""The same for the densities of two patterns."""

ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
"""The dtype whose measurements tell the same, where there are none of one."""


@dataclass(frozen=True)
class TunedRow:
    """A line of a table.

    Args:
        format: its name.
        pattern: of the weight.
        variant: the values of the params that `Format.tuned_by` names.
        dtype: of x and of the weight that was packed.
        n: output features.
        k: input features.
        m: tokens.
        kernel: of the format.
        us: microseconds of a product, weights read from memory.
        dense_us: those of the dense one.
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
    """Return the file name of a GPU's table: ``nvidia-h200.csv``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".csv"


def user_table(gpu: str) -> Path:
    """Return where the user's table of a GPU is."""
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
    """Return a GPU's rows by format, variant and dtype; the user's replace shipped ones of the same measurement."""
    found: dict[tuple[object, ...], TunedRow] = {}
    for path in (SHIPPED / table_name(gpu), user_table(gpu)):
        for row in read_table(path) if path.exists() else ():
            found[(row.format, row.pattern, row.variant, row.dtype, row.n, row.k, row.m, row.kernel)] = row
    grouped = defaultdict(list)
    for row in found.values():
        grouped[row.format, row.variant, row.dtype].append(row)
    return dict(grouped)


@dataclass(frozen=True)
class Measured:
    """How long a kernel takes for a product, by a table.

    Args:
        us: microseconds.
        dense_us: those of the dense product, measured beside it.
    """

    us: float
    dense_us: float


def ranking(problem: Problem, tuned_by: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the kernels that were measured for a product like this one, the fastest first; or none.

    Args:
        problem: the product.
        tuned_by: params that kernels depend on.
    Raises:
        InputError: a table cannot be read.
    """
    times = measured_times(problem, tuned_by, device_facts(problem.device).name)
    return tuple(sorted(times, key=lambda name: times[name].us))


@lru_cache(maxsize=4096)
def measured_times(problem: Problem, tuned_by: tuple[str, ...], gpu: str) -> Mapping[str, Measured]:
    """Return the times of the kernels that were measured on a GPU for a product like this one; or none.

    They are those of the nearest measured pattern and shape, which may differ in size from the product's.

    Args:
        problem: the product.
        tuned_by: params that kernels depend on.
        gpu: the vendor's name.
    Raises:
        InputError: a table cannot be read.
    """
    variant = variant_of(problem.params, tuned_by)
    dtype = str(problem.dtype).removeprefix("torch.")
    table = _rows_of(gpu)
    of_dtypes = (table.get((problem.spec.format, variant, name), []) for name in (dtype, ALIKE.get(dtype, dtype)))
    rows = next(filter(None, of_dtypes), [])
    rows = _nearest_shape(_nearest_pattern(rows, problem.pattern), problem)
    return _interpolated(rows, problem.m)


def variant_of(params: Mapping[str, object], tuned_by: Iterable[str]) -> str:
    """Return the value of the column ``variant``."""
    return " ".join(str(params.get(name, "")) for name in tuned_by)


def _nearest_pattern(rows: list[TunedRow], pattern: Pattern) -> list[TunedRow]:
    """Keep the rows of this pattern, or of the one of its family whose density is nearest, if it is near."""
    exact = [row for row in rows if row.pattern == str(pattern)]
    if exact:
        return exact
    distances = {}
    for text in {row.pattern for row in rows}:
        other = parse_pattern(text)
        if type(other) is type(pattern):
            distances[text] = abs(math.log(max(other.density, 1e-9) / max(pattern.density, 1e-9)))
    near = min(distances, key=lambda text: (distances[text], text), default=None)
    return [row for row in rows if row.pattern == near] if near and distances[near] <= FAR_DENSITY else []


def _nearest_shape(rows: list[TunedRow], problem: Problem) -> list[TunedRow]:
    def distance(row: TunedRow) -> float:
        return abs(math.log(row.n / problem.n)) + abs(math.log(row.k / problem.k))

    near = min(rows, key=distance, default=None)
    if near is None or distance(near) > FAR_SHAPE:
        return []
    return [row for row in rows if (row.n, row.k) == (near.n, near.k)]


def _interpolated(rows: list[TunedRow], m: int) -> dict[str, Measured]:
    """Return each kernel's time for M tokens, from the nearest measured M on both sides; none where one is missing."""
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
