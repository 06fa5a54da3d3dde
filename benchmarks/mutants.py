"""Mutation testing of the compression algorithms and the packers: one CSV row per mutant, drawn with a seed.

    python benchmarks/mutants.py results/mutants.csv --count 150

A mutant is the source with one operator, comparison, constant, condition or statement changed. It is made in a copy of
the tree, and the tests in `TESTS` run on it, up to the first failure. Rows that the CSV already has are not run again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401 (imported once, before each run forks)
import pytest
import torch
import transformers  # noqa: F401
from rows import read_rows, write_rows

TREE = Path(__file__).resolve().parents[1]
SEARCH = ("test_bank.py", "test_score.py", "test_search.py", "test_space.py")
TESTS = {
    "compress/prune/*.py": ("compress/prune",),
    "compress/search/[!aju_]*.py": tuple(f"compress/search/{name}" for name in SEARCH),
    "compress/search/allocate.py": ("compress/search/test_allocate.py",),
    "compress/tune/*.py": ("compress/tune",),
    "compress/calibration.py": ("compress/test_calibration.py",),
    "patterns/*.py": ("patterns",),
    "formats/bitmask/storage/[!_g]*.py": ("formats/bitmask/test_storage.py", "formats/bitmask/test_check.py"),
    "formats/ec_csr/storage/[!_g]*.py": ("formats/ec_csr/test_storage.py", "formats/ec_csr/test_check.py"),
    "formats/ec_csr/paper/[!_]*.py": tuple(
        f"formats/ec_csr/test_{name}.py" for name in ("storage", "check", "extract", "paper")
    ),
    "formats/gqs/storage/[!_g]*.py": ("formats/gqs/test_storage.py", "formats/gqs/test_check.py"),
    "formats/slide24/storage/[!_g]*.py": tuple(
        f"formats/slide24/test_{name}.py" for name in ("storage", "check", "decomposition", "gpu_layout")
    ),
    "formats/vector_nm/storage/[!_g]*.py": ("formats/vector_nm/test_storage.py", "formats/vector_nm/test_check.py"),
}
"""Sources in semisparse/ -> tests in tests/ that should tell a mutant of theirs."""

SECONDS = 240
"""Time limit of a mutant's tests; a mutant that takes longer counts as killed."""

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COLUMNS = ("file", "line", "before", "after", "outcome", "seconds")
KEY = COLUMNS[:4]


class Mutant(NamedTuple):
    """A part of a source file, and what replaces it; ``start`` and ``end`` are offsets in its UTF-8 bytes."""

    path: Path
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The first columns of its row."""
        return str(self.path), str(self.line), self.before, self.after


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a source file, given relative to the tree."""
    source = (TREE / path).read_bytes()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    tree = ast.parse(source)
    for node in _executed(tree):
        for changed in _changes(node):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before = " ".join(source[start:end].decode().split())
            yield Mutant(path, node.lineno, start, end, before, changed)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotations, docstrings, imports and messages of errors."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(
                node, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr
            ):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            yield node
            yield from _executed(node)


def _changes(node: ast.AST) -> Iterator[str]:
    """Yield the source of what may replace a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield "(" + ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)) + ")"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield "(" + ast.unparse(ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)) + ")"
    elif isinstance(node, ast.BoolOp):
        yield "(" + ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values)) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "(" + ast.unparse(node.operand) + ")"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "(" + ast.unparse(ast.IfExp(node.test, node.orelse, node.body)) + ")"
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def run(mutant: Mutant, tests: tuple[str, ...], copy: Path) -> tuple[str, float]:
    """Plant a mutant in the copy and run the tests; return how it ended, and the seconds."""
    target = copy / mutant.path
    source = target.read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    started = time.perf_counter()
    child = multiprocessing.get_context("fork").Process(target=_run_tests, args=(tests, copy))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
    target.write_bytes(source)
    return "survived" if child.exitcode == 0 else "killed", time.perf_counter() - started


def _run_tests(tests: tuple[str, ...], copy: Path) -> None:
    """Run tests in this process, which has imported everything except semisparse; exit with pytest's status."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
    os._exit(int(status))


def main() -> None:
    """Draw mutants and run those that the CSV lacks."""
    sys.dont_write_bytecode = True  # a mutant of the same size and second would run as the one before it
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {tuple(row[key] for key in KEY) for row in rows}
    every = []
    for pattern, tests in TESTS.items():
        for path in sorted((TREE / "semisparse").glob(pattern)):
            every += [(mutant, tests) for mutant in mutants_of(path.relative_to(TREE))]
    print(f"{len(every)} mutants, {options.count} drawn", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for name in ("semisparse", "tests", "results", "docs"):
            shutil.copytree(TREE / name, copy / name)
        shutil.copy(TREE / "pyproject.toml", copy)
        for mutant, tests in random.Random(options.seed).sample(every, options.count):
            if mutant.key in done:
                continue
            outcome, seconds = run(mutant, tests, copy)
            rows.append(dict(zip(COLUMNS, (*mutant.key, outcome, f"{seconds:.1f}"), strict=True)))
            write_rows(options.csv, rows, COLUMNS)
            print(*rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
