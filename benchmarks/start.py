"""CPU seconds and wall seconds of a command's start: what is imported, how, and how the process ends.

    python benchmarks/start.py OUT.csv --model DIR [--build NAME] [--parts import-torch,import,generate] [--runs 5]

Each part is a process of its own, on a CPU; the parts take turns. `cpu_seconds` and `wall_seconds` are the least of all
runs: other programs on the machine only add to them. The parts:

- ``import-torch``, ``import``: torch alone, and all that `generate` imports.
- ``import-uncollected``: the same without garbage collection; ``import-no-end``: without Python's own end, which looks
  through all objects once more; ``import-exit``: without both.
- ``generate``: `semisparse generate` of 8 tokens; ``generate-no-bytecode``: in an environment whose packages have no
  bytecode and where Python writes none, after one such run.
- ``eval``, ``compress``, ``plan``: these commands with the demo's model, on a short text, by magnitude, of one shape.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import read_rows, write_rows

import semisparse.demo

ENGINE = "import semisparse.engine"
PARTS = {
    "import-torch": "import torch",
    "import": ENGINE,
    "import-uncollected": f"import gc; gc.disable(); {ENGINE}; gc.enable()",
    "import-no-end": f"import os; {ENGINE}; os._exit(0)",
    "import-exit": f"import gc, os; gc.disable(); {ENGINE}; gc.freeze(); gc.enable(); os._exit(0)",
}
"""Python code by part."""

DEMO = Path(semisparse.demo.__file__).parent / "model"
VERBS = {
    "eval": f"eval {DEMO} --json --text",
    "compress": f"compress {DEMO} --json --recipe rheosparse --set prune=magnitude --set search=none --out",
    "plan": "plan --json --shape 4096,4096 --gpu h200",
}
"""The command line by part; the first two end with a path."""

TEXT = "Once upon a time there was a dog. " * 40

COLUMNS = ("build", "part", "cpu_seconds", "wall_seconds", "runs", "machine")


def run_once(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return a process's CPU seconds and wall seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)[:200]} failed: {error[-2000:]}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - start


def main() -> None:
    """Run the parts in turn, and write the CSV after each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--build", default="")
    parser.add_argument("--parts", default=",".join((*PARTS, "generate", "generate-no-bytecode")))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    asked = ["--prompt", "def main(", "--max-new-tokens", "8", "--device", "cpu", "--json"]
    generate = [sys.executable, "-m", "semisparse.cli", "generate", str(options.model), *asked]
    names = options.parts.split(",")
    empty = tempfile.mkdtemp()
    (Path(empty) / "text.txt").write_text(TEXT, encoding="utf-8")
    paths = {"eval": [f"{empty}/text.txt"], "compress": [f"{empty}/out"]}
    verbs = {
        name: [sys.executable, "-m", "semisparse.cli", *line.split(), *paths.get(name, ())]
        for name, line in VERBS.items()
    }
    commands = {
        name: generate if "generate" in name else verbs.get(name) or [sys.executable, "-c", PARTS[name]]
        for name in names
    }
    without = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": f"{empty}/none",
        "SEMISPARSE_CACHE": f"{empty}/cache",
    }
    environments = {name: without if name.endswith("no-bytecode") else {} for name in names}
    if "generate-no-bytecode" in names:
        run_once(generate, without)
    kept = [
        row for row in read_rows(options.out) if (row["build"], row["part"]) not in {(options.build, n) for n in names}
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(options.runs):
        for name, command in commands.items():
            shutil.rmtree(f"{empty}/out", ignore_errors=True)
            times[name].append(run_once(command, environments[name]))
        rows = [
            {
                "build": options.build,
                "part": name,
                "cpu_seconds": f"{min(cpu for cpu, _ in runs):.2f}",
                "wall_seconds": f"{min(wall for _, wall in runs):.2f}",
                "runs": str(len(runs)),
                "machine": f"{os.cpu_count()} cores",
            }
            for name, runs in times.items()
        ]
        write_rows(options.out, [*kept, *rows], COLUMNS)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
