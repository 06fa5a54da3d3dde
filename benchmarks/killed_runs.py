"""Kill runs of ``compress`` at random moments, resume them, and compare the bytes with those of an uninterrupted run.

Usage: python benchmarks/killed_runs.py OUT.csv MODEL TEXT --scratch DIR [--recipes sparsegpt,auto] [--ranks 2]
                                       [--times 10] [--samples 64] [--seed 0]

The recipes take turns; with `--ranks 2` runs have one and two ranks in turn, and one rank is killed with SIGKILL. Each
run is resumed with one rank, or with one or two. `pieces` is how many pieces of work were finished when it was
killed, `of` the most that the journal of an uninterrupted run held. The exit status is 1 if any bytes differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from rows import write_rows

RECIPES = {
    "sparsegpt": "--recipe rheosparse --set search=none",
    "search": "--recipe rheosparse --set prune=wanda --set search=evolution --set search_effort=12",
    "slidesparse": "--recipe slidesparse",
    "nm-spmm": "--recipe nm-spmm",
    "ec-spmv": "--recipe ec-spmv",
    "gqsa": "--recipe gqsa --set tune_epochs=1",
    "auto": "--recipe auto --target bits=3.0 --set search_effort=12 --set tune_epochs=1",
}
"""What `compress` is asked for, by the name in the CSV."""

SECONDS = 2.0
"""A run is killed within this time after a random number of its pieces is finished."""

COLUMNS = ("recipe", "ranks", "killed_rank", "pieces", "of", "resumed_ranks", "same_bytes")


def start(options: argparse.Namespace, recipe: str, ranks: int, out: Path) -> subprocess.Popen[bytes]:
    """Start a run, which continues where an earlier one was killed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    arguments = [str(options.model), *RECIPES[recipe].split(), "--calib", str(options.text)]
    arguments += ["--samples", str(options.samples), "--device", "cpu", "--out", str(out), "--resume"]
    command = [sys.executable, *launch, "-m", "semisparse.cli", "compress", *arguments]
    log = (options.scratch / "log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finished_pieces(out: Path) -> list[Path]:
    """Return the pieces of work that a run has finished."""
    return list(out.with_name(f"{out.name}.partial").glob("*-*.json"))


def most_pieces(process: subprocess.Popen[bytes], out: Path) -> int:
    """Wait for an uninterrupted run, and return the most pieces that its journal held."""
    most = 0
    while process.poll() is None:
        most = max(most, len(finished_pieces(out)))
        time.sleep(0.01)
    assert process.returncode == 0, "see the log"
    return most


def kill_later(
    process: subprocess.Popen[bytes], out: Path, rng: random.Random, rank: int, ranks: int, wanted: int
) -> bool:
    """Kill a rank with SIGKILL at a random time after ``wanted`` pieces; return False if the run has ended."""
    while process.poll() is None and len(finished_pieces(out)) < wanted:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, SECONDS))
    if process.poll() is not None:
        return False
    workers = psutil.Process(process.pid).children() if ranks > 1 else [psutil.Process(process.pid)]
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if ranks == 1 or worker.environ().get("RANK") == str(rank):
                worker.send_signal(signal.SIGKILL)
    process.wait()
    return not out.exists()


def main() -> None:
    """Write a row per killed run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, rows, recipes = random.Random(options.seed), list[dict[str, str]](), options.recipes.split(",")
    most: dict[str, int] = {}
    for number in range(options.times * len(recipes)):
        recipe, ranks = recipes[number % len(recipes)], 1 + number // len(recipes) % options.ranks
        if recipe not in most:
            whole = options.scratch / recipe
            most[recipe] = most_pieces(start(options, recipe, 1, whole), whole)
        out, rank, resumed = options.scratch / "out", rng.randrange(ranks), rng.randint(1, options.ranks)
        wanted = rng.randint(0, most[recipe])
        while not kill_later(start(options, recipe, ranks, out), out, rng, rank, ranks, wanted):
            shutil.rmtree(out)  # it was finished before
        pieces = len(finished_pieces(out))
        assert start(options, recipe, resumed, out).wait() == 0, "see the log"
        same = all(
            (out / name).read_bytes() == (options.scratch / recipe / name).read_bytes()
            for name in ("model.safetensors", "config.json")
        )
        shutil.rmtree(out)
        values = (recipe, ranks, rank, pieces, most[recipe], resumed, same)
        rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
        write_rows(options.out, rows, COLUMNS)
        print(rows[-1], flush=True)
    sys.exit(any(row["same_bytes"] != "True" for row in rows))


if __name__ == "__main__":
    main()
