"""What `semisparse generate` takes on model directories, beside the captured decode step that `bench model` times.

    python benchmarks/generate_command.py OUT.csv --data DATA --scratch DIR [--arch llama2-7b] [--blocks 32]
        [--weights dense,gqs-w4s50,bitmask,vector_nm,ec_csr] [--together write,first] [--phases time,step]

DATA holds models/pycode-11m, for its tokenizer, and text/pycode-eval.txt. Needs a GPU. Every command is a process of
its own. The phases, which may run in calls of their own:

- ``write``: directories with random weights, in DIR.
- ``first``: `generate` with an empty cache of kernels, which compiles them: ``first_compile_seconds``.
- ``time``: `generate` again. ``wall_seconds`` is the whole process, with Python's imports; ``read_seconds`` is what
  reading the directory's files takes beside it.
- ``step``: what `bench model` times on the directory, in this process.

``--together`` names phases that all weights run at once, each in a process of its own: their seconds are upper bounds.
``--phases`` follow, one weight after another. A weight whose phase fails is left out of what follows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from compressing import TOKENIZER, write_model
from rows import read_rows, write_rows
from safetensors import safe_open
from vllm_checkpoints import config_of, write_ours

from semisparse.bench.model import Workload, measure_model
from semisparse.checkpoint import load_tokenizer
from semisparse.engine import Engine

WEIGHTS = ("dense", "gqs-w4s50", "bitmask", "vector_nm", "ec_csr")
"""``dense``, and columns of `vllm_checkpoints`."""

PROMPT, NEW = 512, 128
COLUMNS = (
    *("arch", "blocks", "weights", "machine", "gigabytes", "read_seconds", "wall_seconds", "load_seconds"),
    *("first_compile_seconds", "compile_seconds", "first_token_ms", "generate_ms_per_token"),
    *("captured_ms_per_token", "captured_first_token_ms"),
)


def command(cache: Path, *arguments: object) -> str:
    """Run a semisparse command with a directory for its compiled kernels, and return its output.

    The model has to run in the engine's own code, not in transformers'.
    """
    run = [sys.executable, "-m", "semisparse.cli", *map(str, arguments)]
    kept = {**os.environ, "SEMISPARSE_CACHE": str(cache)}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=kept)
    if done.returncode or "transformers' own code" in done.stderr:
        raise SystemExit(f"{' '.join(map(str, arguments))[:200]} failed: {done.stderr[-2000:]}")
    return done.stdout


def write(options: argparse.Namespace, weights: str, model: Path) -> dict[str, object]:
    """Write a directory with random weights."""
    if weights == "dense":
        write_model(options.arch, options.blocks, options.data, model)
    else:
        model.mkdir(parents=True)
        write_ours(model, config_of(options.arch, options.blocks), weights)
        write_index(model)
        for name in TOKENIZER:
            shutil.copyfile(options.data / "models" / "pycode-11m" / name, model / name)
    return {"gigabytes": f"{sum(file.stat().st_size for file in model.iterdir()) / 1e9:.2f}"}


def write_index(model: Path) -> None:
    """Write the file that says which tensor is in which safetensors file."""
    files: dict[str, str] = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@cache
def prompt_of(model: Path, text: Path) -> str:
    """Return a text of PROMPT tokens, the first of them the tokenizer's own."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer(text.read_text()[:20_000]).input_ids
    return str(tokenizer.decode(ids[: PROMPT - 1], skip_special_tokens=True))


def cache_of(options: argparse.Namespace, weights: str) -> Path:
    """Return the directory of a weight's compiled kernels."""
    folder: Path = options.scratch / f"cache-{weights}"
    return folder


def generated(options: argparse.Namespace, weights: str, model: Path) -> dict[str, float]:
    """Run `generate`, and return its JSON and the seconds of the whole process."""
    prompt = prompt_of(model, options.data / "text" / "pycode-eval.txt")
    start = time.perf_counter()
    found: dict[str, float] = json.loads(
        command(cache_of(options, weights), "generate", model, "--prompt", prompt, "--max-new-tokens", NEW, "--json")
    )
    found["wall_seconds"] = time.perf_counter() - start
    print(weights, {key: value for key, value in found.items() if key != "text"}, file=sys.stderr, flush=True)
    return found


def first(options: argparse.Namespace, weights: str, model: Path) -> dict[str, object]:
    """Time compiling with an empty cache."""
    return {"first_compile_seconds": f"{generated(options, weights, model)['compile_seconds']:.2f}"}


def timed(options: argparse.Namespace, weights: str, model: Path) -> dict[str, object]:
    """Time `generate`."""
    start = time.perf_counter()
    subprocess.run(["cat", *model.glob("*.safetensors")], stdout=subprocess.DEVNULL, check=True)
    read = time.perf_counter()
    found = generated(options, weights, model)
    return {
        "read_seconds": f"{read - start:.2f}",
        "wall_seconds": f"{found['wall_seconds']:.1f}",
        "load_seconds": f"{found['load_seconds']:.2f}",
        "compile_seconds": f"{found['compile_seconds']:.2f}",
        "first_token_ms": f"{1e3 * found['first_token_seconds']:.1f}",
        "generate_ms_per_token": f"{1e3 / found['decode_tokens_per_second']:.3f}",
    }


def step(options: argparse.Namespace, weights: str, model: Path) -> dict[str, object]:
    """Time the captured decode step."""
    os.environ["SEMISPARSE_CACHE"] = str(cache_of(options, weights))
    speed = measure_model(Engine(model), options.arch, weights, Workload(prompt=PROMPT, new=NEW))
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "captured_ms_per_token": f"{speed.decode_ms:.3f}",
        "captured_first_token_ms": f"{speed.first_token_ms:.1f}",
    }


PHASES: dict[str, Callable[[argparse.Namespace, str, Path], dict[str, object]]] = {
    "write": write,
    "first": first,
    "time": timed,
    "step": step,
}


def run_phases(options: argparse.Namespace, weights: str, phases: Sequence[str]) -> dict[str, str]:
    """Run phases for one weight, and return their columns."""
    found: dict[str, str] = {}
    for phase in phases:
        start = time.perf_counter()
        values = PHASES[phase](options, weights, options.scratch / weights)
        found |= {key: str(value) for key, value in values.items()}
        print(f"{phase} {weights}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


class Table:
    """The CSV: a row per weight, written after each result.

    Args:
        options: the arguments of `main`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rows = {row["weights"]: row for row in read_rows(options.out)}

    def add(self, weights: str, values: dict[str, str]) -> None:
        """Set columns of a row, and write the file."""
        base = {"arch": self._options.arch, "blocks": str(self._options.blocks), "weights": weights}
        row = self._rows.setdefault(weights, {**base, "machine": torch.cuda.get_device_name()})
        row |= values
        rows = [{column: row.get(column, "") for column in COLUMNS} for row in self._rows.values()]
        write_rows(self._options.out, rows, COLUMNS)
        print(row, flush=True)


def main() -> None:
    """Run the phases, and write the CSV after each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--together", default="")
    parser.add_argument("--phases", default=",".join(PHASES))
    options = parser.parse_args()
    together, alone = ([phase for phase in text.split(",") if phase] for text in (options.together, options.phases))
    left, table = options.weights.split(","), Table(options)
    asked = len(left)
    if together:
        with ProcessPoolExecutor(len(left), get_context("spawn")) as pool:
            runs = {pool.submit(run_phases, options, weights, together): weights for weights in left}
            for run in as_completed(runs):
                if failed(run.exception(), runs[run], left):
                    continue
                table.add(runs[run], run.result())
    for weights in tuple(left):
        for phase in alone:
            try:
                table.add(weights, run_phases(options, weights, [phase]))
            except (Exception, SystemExit) as error:
                failed(error, weights, left)
                break
    if len(left) < asked:
        raise SystemExit(1)


def failed(error: BaseException | None, weights: str, left: list[str]) -> bool:
    """Report an error, if there is one, and take the weight from those that are left."""
    if error is not None:
        print(f"{weights} failed: {error}", file=sys.stderr, flush=True)
        left.remove(weights)
    return error is not None


if __name__ == "__main__":
    main()
