"""Kill runs of ``compress`` at random moments, resume them, and compare the bytes with those of a run that was not.

Usage: python benchmarks/killed_runs.py OUT.csv MODEL TEXT --scratch DIR [--times 10] [--samples 64] [--seed 0]

Runs have one and two ranks in turn, with a search and without; of two, one is killed with SIGKILL. Each is resumed with
one or two ranks. `pieces` is how many pieces of work were finished when it was killed. Ends with status 1 if any bytes
differ.
"""

from __future__ import annotations

import argparse
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

RECIPES = {"sparsegpt": ["search=none"], "search": ["prune=wanda", "search=evolution", "search_effort=12"]}
MOST_PIECES, SECONDS = 5, 2.0
COLUMNS = ("recipe", "ranks", "killed_rank", "pieces", "resumed_ranks", "same_bytes")


def start(options: argparse.Namespace, recipe: str, ranks: int, out: Path) -> subprocess.Popen[bytes]:
    """Start a run, which goes on where an earlier one was killed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    settings = [word for setting in RECIPES[recipe] for word in ("--set", setting)]
    arguments = [str(options.model), "--recipe", "rheosparse", *settings, "--calib", str(options.text)]
    arguments += ["--samples", str(options.samples), "--device", "cpu", "--out", str(out), "--resume"]
    command = [sys.executable, *launch, "-m", "semisparse.cli", "compress", *arguments]
    log = (options.scratch / "log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finished_pieces(out: Path) -> list[Path]:
    """Return the pieces of work that a run has finished."""
    return list(out.with_name(f"{out.name}.partial").glob("*-*.json"))


def kill_later(process: subprocess.Popen[bytes], out: Path, rng: random.Random, rank: int, ranks: int) -> bool:
    """Kill a rank with SIGKILL at a random time after a random number of pieces; return False if the run has ended."""
    wanted = rng.randrange(MOST_PIECES)
    while process.poll() is None and len(finished_pieces(out)) < wanted:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, SECONDS))
    if process.poll() is not None:
        return False
    workers = psutil.Process(process.pid).children() if ranks > 1 else [psutil.Process(process.pid)]
    for worker in workers:
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
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), list[dict[str, str]]()
    for number in range(options.times):
        recipe, ranks = list(RECIPES)[number % 2], 1 + number // 2 % 2
        if not (options.scratch / recipe).exists():
            assert start(options, recipe, 1, options.scratch / recipe).wait() == 0, "see the log"
        out, rank, resumed = options.scratch / "out", rng.randrange(ranks), rng.choice((1, 2))
        while not kill_later(start(options, recipe, ranks, out), out, rng, rank, ranks):
            shutil.rmtree(out)  # it was finished before
        pieces = len(finished_pieces(out))
        assert start(options, recipe, resumed, out).wait() == 0, "see the log"
        same = all(
            (out / name).read_bytes() == (options.scratch / recipe / name).read_bytes()
            for name in ("model.safetensors", "config.json")
        )
        shutil.rmtree(out)
        values = (recipe, ranks, rank, pieces, resumed, same)
        rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
        write_rows(options.out, rows, COLUMNS)
        print(rows[-1], flush=True)
    sys.exit(any(row["same_bytes"] != "True" for row in rows))


if __name__ == "__main__":
    main()
