"""Seconds from the command `generate` to its end on model directories, where a token or two are asked for.

    python benchmarks/start_on_gpu.py OUT.csv --scratch DIR [--weights gqs-w4s50,bitmask,dense] [--runs 3]
        [--cores 0-15] [--device auto] [--traces TRACES.csv]

DIR holds a directory per name, as `generate_command.py --phases write` makes them. Every start is a process of its own:

- ``first``: with an empty cache. Kernels are compiled, and Python's bytecode if packages lack it.
- ``kernels``: again with an empty cache but for the bytecode.
- ``later``: everything is compiled, and recorded how the decoder is built.

``read_seconds`` is `cat` of the weights just before the start. ``TRACES.csv`` has one more later start by its
parts, each in seconds after the process was created; what tells them apart costs some milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rows import add_row, read_rows

CREATED = "SEMISPARSE_BENCH_CREATED"
"""The variable that tells a traced process when it was created."""

TRACED = (
    ("semisparse.engine.engine", "load_recorded", "all of loading"),
    ("semisparse.engine.recorded", "recorded", "blueprint read"),
    ("semisparse.engine.recorded", "open_directory", "headers and config checked"),
    ("semisparse.engine.recorded", "load_bare", "weights loaded"),
    ("semisparse.engine.bare", "BareDecoder", "modules made"),
    ("semisparse.engine.bare", "_read", "weights copied and checked"),
    ("semisparse.engine.bare", "join_layers", "layers joined and arranged"),
    ("semisparse.engine.backend", "Decoder", "engine's decoder made"),
    ("semisparse.engine.backend", "check_against", "logits of 8 tokens"),
    ("semisparse.runtime.cuda_libraries", "wait", "libraries waited for"),
    ("semisparse.engine.prompts", "CapturedPrompts._captured", "prompt captured"),
    ("semisparse.engine.backend", "DecoderBackend._graph", "step captured"),
    ("semisparse.engine.decoder", "Decoder.compile", "kernels loaded"),
    ("semisparse.engine.engine", "Engine._compile", "all of compiling and warming up"),
    ("semisparse.engine.engine", "Engine._run", "all of generating"),
)
"""Module, function and what it does, of the parts of a start."""


def mark(part: str, began: float, ended: float) -> None:
    """Write a part to stderr."""
    created = float(os.environ[CREATED])
    print("MARK", json.dumps([part, round(began - created, 3), round(ended - created, 3)]), file=sys.stderr)


def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Return a function that calls another and marks when."""

    def run(*arguments: Any, **named: Any) -> Any:
        began = time.time()
        found = call(*arguments, **named)
        if not isinstance(found, Iterator):
            mark(part, began, time.time())
            return found
        return marked_at_the_end(found, part, began)

    return run


def marked_at_the_end(values: Iterator[Any], part: str, began: float) -> Iterator[Any]:
    """Yield values and mark when the last one has been used."""
    yield from values
    mark(part, began, time.time())


def traced(arguments: list[str]) -> None:
    """Run a command in this process as `python -m semisparse.cli` does, and mark its parts."""
    began = time.time()
    import semisparse.api.start as start
    from semisparse.cli.process import run

    mark("command line imported", began, time.time())
    original = start.importing

    @contextmanager
    def importing(*given: Any, **named: Any) -> Iterator[None]:
        began = time.time()
        with original(*given, **named):
            yield
        mark("engine imported", began, time.time())
        import importlib

        for module, name, part in TRACED:
            owner: Any = importlib.import_module(module)
            *outer, last = name.split(".")
            for attribute in outer:
                owner = getattr(owner, attribute)
            setattr(owner, last, timed(getattr(owner, last), part))

    start.importing = importing
    sys.argv = ["semisparse", *arguments]
    run()


def started(
    options: argparse.Namespace, cache: Path, model: Path, trace: bool = False
) -> tuple[float, dict[str, Any], str]:
    """Run `generate`; return the process's seconds, its JSON and its stderr."""
    asked = ["generate", str(model), "--prompt", "def main(", "--max-new-tokens", str(options.new), "--json"]
    python = [sys.executable, __file__, "--traced"] if trace else [sys.executable, "-m", "semisparse.cli"]
    pinned = ["taskset", "-c", options.cores] if options.cores else []
    kept = {**os.environ, "SEMISPARSE_CACHE": str(cache), CREATED: str(time.time())}
    began = time.perf_counter()
    run = subprocess.run(
        [*pinned, *python, *asked, "--device", options.device], capture_output=True, text=True, check=False, env=kept
    )
    seconds = time.perf_counter() - began
    if run.returncode or "transformers' own code" in run.stderr:
        raise SystemExit(f"generate {model} failed: {run.stderr[-2000:]}")
    return seconds, json.loads(run.stdout), run.stderr


def read(model: Path) -> float:
    """Return the seconds of reading a directory's weights."""
    began = time.perf_counter()
    subprocess.run(["cat", *model.glob("*.safetensors")], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def measure(options: argparse.Namespace, weights: str, machine: str) -> None:
    """Time the starts of one directory."""
    rows, model, cache = read_rows(options.out), options.scratch / weights, options.scratch / f"cache-{weights}"
    read(model)
    for number, start in enumerate([*options.starts.split(","), *["later"] * options.runs]):
        if start == "first":
            shutil.rmtree(cache, ignore_errors=True)
        elif start == "kernels":
            for folder in cache.iterdir():
                if folder.name != "bytecode":
                    shutil.rmtree(folder)
        reading = read(model)
        seconds, found, _ = started(options, cache, model)
        row = {
            "weights": weights,
            "gigabytes": f"{sum(file.stat().st_size for file in model.iterdir()) / 1e9:.2f}",
            "start": start,
            "run": str(number),
            "read_seconds": f"{reading:.2f}",
            "wall_seconds": f"{seconds:.2f}",
            "beyond_reading": f"{seconds - reading:.2f}",
            "load_seconds": f"{found['load_seconds']:.2f}",
            "compile_seconds": f"{found['compile_seconds']:.2f}",
            "first_token_ms": f"{1e3 * found['first_token_seconds']:.1f}",
            "new_tokens": str(found["new_tokens"]),
            "cores": options.cores or str(os.cpu_count()),
            "load": f"{os.getloadavg()[0]:.1f}",
            "machine": machine,
        }
        add_row(options.out, rows, row)
    if options.traces:
        traces = read_rows(options.traces)
        seconds, _, said = started(options, cache, model, trace=True)
        marks = [json.loads(line[5:]) for line in said.splitlines() if line.startswith("MARK ")]
        for part, began, ended in [*marks, ["the process", 0.0, round(seconds, 3)]]:
            row = {"weights": weights, "part": part, "began": f"{began:.3f}", "ended": f"{ended:.3f}"}
            add_row(options.traces, traces, {**row, "machine": machine})


def main() -> None:
    """Time the starts, and write the CSV after each."""
    if sys.argv[1:2] == ["--traced"]:
        traced(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--weights", default="gqs-w4s50,bitmask,dense")
    parser.add_argument("--starts", default="first,kernels", help="those before the later ones")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--new", type=int, default=2)
    parser.add_argument("--cores", default="", help="CPU cores of the processes, as taskset -c takes them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    asking = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    on_gpu = options.device != "cpu" and shutil.which("nvidia-smi")
    machine = subprocess.check_output(asking, text=True).splitlines()[0] if on_gpu else "CPU"
    for weights in options.weights.split(","):
        measure(options, weights, machine)


if __name__ == "__main__":
    main()
