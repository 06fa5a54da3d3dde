"""Time `semisparse frontier` stage by stage, and store its points; with --plot also draw them.

    python benchmarks/frontier.py DATA results/frontier.csv results/frontier_time.csv --gpu h200 --device cpu

DATA is a directory with ``models/`` and ``text/``. Rows of the same model, device and machine are replaced. A stage
that has begun is printed every 15 seconds, so that the time of an interrupted run is known, too.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from models import MODELS
from rows import read_rows, write_rows

from semisparse.api.frontier import Frontier, frontier
from semisparse.bench.plot_frontier import plot_frontier
from semisparse.runtime.device import device_facts

POINTS = ("model", "computed_on", "points", "recipe", "bits", "kl", "decode_ms", "prompt_ms", "gpu")
TIMES = ("model", "computed_on", "stage", "steps", "seconds", "cpu_seconds", "threads", "load")


class Stages:
    """The wall time and CPU time of each stage of a run.

    Args:
        every: seconds between two lines about the same stage.
    """

    def __init__(self, every: float = 15.0) -> None:
        self._every, self._begun = every, (time.perf_counter(), time.process_time())
        self._stage, self._steps, self._printed = "reading the model", 0, 0.0
        self.rows: list[tuple[str, int, float, float, float]] = []
        """Stage, steps, seconds, CPU seconds and the host's load at its end."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take a report of progress: stage, steps done, all steps."""
        now = time.perf_counter()
        if stage != self._stage:
            self.end()
            self._stage = stage
        if done == 0 or now - self._printed > self._every:
            print(f"{now - self._begun[0]:7.1f} s in {stage}: {done} of {total}", flush=True)
            self._printed = now
        self._steps = total

    def end(self) -> None:
        """End the present stage."""
        now = (time.perf_counter(), time.process_time())
        wall, cpu = (after - before for after, before in zip(now, self._begun, strict=True))
        self.rows.append((self._stage, self._steps, wall, cpu, os.getloadavg()[0]))
        self._begun = now


def main() -> None:
    """Run `frontier` once, and replace its rows in the CSV files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="a directory with models/ and text/")
    parser.add_argument("csv", type=Path, help="the points")
    parser.add_argument("times", type=Path, help="the time of each stage")
    parser.add_argument("--model", default="pycode-11m", choices=MODELS)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    stages = Stages()
    found = frontier(
        options.shared / "models" / options.model,
        options.shared / "text" / MODELS[options.model][0],
        gpu=options.gpu,
        device=options.device,
        progress=stages,
    )
    stages.end()
    where = device_facts("cuda").name if options.device == "cuda" else "cpu"
    rows = [
        (options.model, where, stage, steps, f"{wall:.1f}", f"{cpu:.1f}", torch.get_num_threads(), f"{load:.1f}")
        for stage, steps, wall, cpu, load in stages.rows
    ]
    replace(options.times, TIMES, rows)
    replace(options.csv, POINTS, list(points(options.model, where, found)))
    if options.plot:
        values = found.to_dict()
        plot_frontier(values["points"], values["uniform"], options.plot, f"{options.model}, times for {found.gpu}")
    print(f"{found.seconds:.0f} s, {len(found.points)} points")


def points(model: str, where: str, found: Frontier) -> list[tuple[object, ...]]:
    """Return a row per point of the front, and per choice for all layers."""
    named = [("front", point) for point in found.points] + [("uniform", point) for point in found.uniform]
    rows: list[tuple[object, ...]] = []
    for kind, one in named:
        values = (f"{value:.6g}" for value in (one.bits, one.kl, one.decode_ms, one.prompt_ms))
        rows.append((model, where, kind, one.recipe, *values, found.gpu))
    return rows


def replace(path: Path, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Write rows in place of those of the same model and the same device."""
    new = [dict(zip(columns, map(str, row), strict=True)) for row in rows]
    runs = {(row["model"], row["computed_on"]) for row in new}
    kept = [row for row in read_rows(path) if (row["model"], row["computed_on"]) not in runs]
    write_rows(path, [*kept, *new], columns)


if __name__ == "__main__":
    main()
