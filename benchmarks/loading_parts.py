"""Seconds that loading compressed weights to a GPU takes, and its parts.

    python benchmarks/loading_parts.py results/h200/loading-parts.csv --scratch DIR [--blocks 8] [--weights ec_csr,...]
        [--keep]

Needs a GPU. Writes directories of llama2-7b's first decoder layers, with random weights, to DIR (a RAM disk: reading is
not the subject), and loads each as `Engine` does: once to compile, `REPEATS` times for ``whole`` (the fastest), and
once with a synchronisation around each part. ``arrange`` has the layers' change of layout, ``join`` the rest of joining
them, ``validate`` the check of untrusted tensors, ``place`` copying them to the GPU, ``rest`` all else. The profile of
that load goes to stdout. ``--keep`` leaves the directories, and a later run loads them: to compare commits.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from generate_command import write_index
from rows import write_rows
from vllm_checkpoints import config_of, write_ours

from semisparse.engine import engine
from semisparse.nn import SparseLinear

COLUMNS = ("weights", "blocks", "part", "calls", "seconds", "gigabytes", "machine")
REPEATS = 2
SHOWN = 18
"""Lines of the profile."""


class Parts:
    """Seconds and calls of patched functions, each without those of the patched functions that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = [0.0]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what happens inside to a part."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._inner.append(0.0)
        yield
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        self.seconds[name] += taken - self._inner.pop()
        self.calls[name] += 1
        self._inner[-1] += taken

    def wrapped(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        """Return a function that times another."""

        def call(*arguments: object, **named: object) -> object:
            with self.timed(name):
                return function(*arguments, **named)

        return call


def seconds_to_load(directory: Path) -> float:
    """Load a directory as `Engine` does, and free it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    model = engine._on_device(directory, "cuda", None)
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    del model
    gc.collect()
    torch.cuda.empty_cache()  # a command starts with none
    return taken


def parts_of(directory: Path) -> Parts:
    """Load a directory with timers, and print a profile."""
    parts, profile = Parts(), cProfile.Profile()
    with ExitStack() as stack:
        for name in ("place", "validate", "arrange"):
            if hasattr(SparseLinear, name):  # commits before `place` are timed, too
                function = parts.wrapped(name, getattr(SparseLinear, name))
                stack.enter_context(patch.object(SparseLinear, name, function))
        stack.enter_context(patch.object(engine, "join_layers", parts.wrapped("join", engine.join_layers)))
        with parts.timed("rest"):
            profile.runcall(engine._on_device, directory, "cuda", None)
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)
    return parts


def measure(weights: str, blocks: int, directory: Path) -> list[dict[str, str]]:
    """Write a directory, and return its rows."""
    if not directory.exists():
        directory.mkdir(parents=True)
        write_ours(directory, config_of("llama2-7b", blocks), weights)
        write_index(directory)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e9
    seconds_to_load(directory)
    whole = min(seconds_to_load(directory) for _ in range(REPEATS))
    parts = parts_of(directory)
    rows = []
    for part, taken in (("whole", whole), *parts.seconds.items()):
        row = {"weights": weights, "blocks": blocks, "part": part, "calls": parts.calls.get(part, 1)}
        row |= {"seconds": f"{taken:.3f}", "gigabytes": f"{size:.2f}", "machine": torch.cuda.get_device_name()}
        rows.append({column: str(row[column]) for column in COLUMNS})
        print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    """Measure, and write the CSV after each directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default="ec_csr,bitmask,vector_nm,gqs-w4s50")
    parser.add_argument("--keep", action="store_true", help="leave the directories")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for weights in options.weights.split(","):
        directory = options.scratch / weights
        rows += measure(weights, options.blocks, directory)
        if not options.keep:
            shutil.rmtree(directory)
        write_rows(options.csv, rows, COLUMNS)


if __name__ == "__main__":
    main()
