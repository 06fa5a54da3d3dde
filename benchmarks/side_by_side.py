"""Run benchmark commands as processes side by side, each with a CSV of its own, and merge these into results/.

    python benchmarks/side_by_side.py run COMMANDS OUT --cpus 15 --gpu-processes 5 --seconds 450
    python benchmarks/side_by_side.py merge OUT results

COMMANDS is a text file with a line per process: ``cpu`` or ``cuda``, the name of the CSV in results/ that its rows
belong to, and the arguments of Python, in which ``{csv}`` is the process's own CSV. Lines are started in order; those
on ``cuda`` share the GPU. At the time limit all processes are killed. Benchmarks write each row when it is measured, so
finished rows are kept. `merge` replaces rows of the same run, which is named by the columns of `KEYS`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rows import read_rows, write_rows

KEYS = (
    "model",
    "run",
    "pattern",
    "calibration",
    "method",
    "kept",
    "search",
    "quant",
    "tune",
    "samples",
    "seed",
    "target",
    "build",
)
"""The columns that name a run, of all benchmarks; a CSV has some of them."""


@dataclass
class Job:
    """A process to run.

    Args:
        device: ``cpu`` or ``cuda``.
        csv: name of the CSV in results/.
        arguments: of Python.
    """

    device: str
    csv: str
    arguments: list[str]


def main() -> None:
    """Run the processes, or merge their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="run the processes")
    runs.add_argument("commands", type=Path)
    runs.add_argument("out", type=Path, help="a folder for the CSV and log of each process")
    runs.add_argument("--cpus", type=int, default=os.cpu_count(), help="processes at the same time")
    runs.add_argument("--gpu-processes", type=int, default=4, help="of these, at most so many on the GPU")
    runs.add_argument("--seconds", type=float, required=True, help="after which every process is killed")
    runs.set_defaults(call=run)
    merges = verbs.add_parser("merge", help="merge the rows of finished and killed processes")
    merges.add_argument("out", type=Path)
    merges.add_argument("results", type=Path)
    merges.set_defaults(call=merge)
    options = parser.parse_args()
    options.call(options)


def run(options: argparse.Namespace) -> None:
    """Run the jobs in order, as many at a time as fit; kill what is left at the time limit."""
    waiting = read_jobs(options.commands)
    options.out.mkdir(parents=True, exist_ok=True)
    started, running, number = time.monotonic(), dict[int, tuple[Job, subprocess.Popen[bytes], float]](), 0
    try:
        while (waiting or running) and time.monotonic() - started < options.seconds:
            for key, (job, process, begun) in list(running.items()):
                if process.poll() is not None:
                    del running[key]
                    _say(started, key, job, f"status {process.returncode} after {time.monotonic() - begun:.0f} s")
            on_gpu = sum(job.device == "cuda" for job, *_ in running.values())
            fits = [job for job in waiting if job.device == "cpu" or on_gpu < options.gpu_processes]
            if fits and len(running) < options.cpus:
                job = fits[0]
                waiting.remove(job)
                running[number] = (job, start(job, options.out / f"{number:03d}"), time.monotonic())
                number += 1
            else:
                time.sleep(0.5)
    finally:
        for key, (job, process, _) in running.items():
            os.killpg(process.pid, signal.SIGKILL)
            _say(started, key, job, "killed at the time limit")
        for job in waiting:
            _say(started, -1, job, "not started")


def read_jobs(path: Path) -> list[Job]:
    """Read the jobs; lines that begin with # are left out."""
    lines = [shlex.split(line) for line in path.read_text().splitlines() if line.strip() and line[0] != "#"]
    return [Job(device, csv, arguments) for device, csv, *arguments in lines]


def start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process on one thread, in a process group of its own, and make the folder of its files."""
    folder.mkdir()
    own = folder / job.csv
    arguments = [argument.replace("{csv}", str(own)) for argument in job.arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def _say(started: float, number: int, job: Job, what: str) -> None:
    print(f"{time.monotonic() - started:5.0f} s, {number:3d} {what}: {shlex.join(job.arguments)}", flush=True)


def merge(options: argparse.Namespace) -> None:
    """Add the processes' rows to the CSV files in results/."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(options.out.glob("*/*.csv")):
        found.setdefault(path.name, []).extend(read_rows(path))
    for name, new in found.items():
        rows = {_key(row): row for row in [*read_rows(options.results / name), *new]}
        columns = dict.fromkeys(column for row in rows.values() for column in row)
        write_rows(options.results / name, [dict.fromkeys(columns, "") | row for row in rows.values()], list(columns))
        print(f"{name}: {len(new)} rows measured, {len(rows)} in all")


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row.get(column, "") for column in KEYS)


if __name__ == "__main__":
    main()
