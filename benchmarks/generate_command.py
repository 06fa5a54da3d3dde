"""What `semisparse generate` takes on model directories, beside the captured decode step that `bench model` times.

Usage: python benchmarks/generate_command.py OUT.csv --data DATA --scratch DIR [--arch llama2-7b] [--blocks 8]

DATA holds models/pycode-11m, for its tokenizer, and text/pycode-eval.txt. A model directory DIR/dense is taken if
there is one. Every command is a process of its own. The first `warm` of a format compiles its kernels; the figures of
`generate` are those of a process after it. `wall_seconds` is the whole process, with Python's imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from compressing import write_model
from rows import read_rows, write_rows

from semisparse.checkpoint import load_tokenizer

FORMATS = {
    "dense": None,
    "bitmask 32:64": ("rheosparse", ["search=none", "prune=magnitude"]),
    "gqs W4S50": ("gqsa", ["prune=magnitude", "tune=none"]),
}
PROMPT, NEW = 512, 128
COLUMNS = ("arch", "blocks", "format", "warm_seconds", "wall_seconds", "load_seconds", "compile_seconds")
COLUMNS += ("first_token_ms", "generate_ms_per_token", "captured_ms_per_token")


def command(*arguments: object) -> str:
    """Run a semisparse command and return its output."""
    run = [sys.executable, "-m", "semisparse.cli", *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))[:200]} failed: {done.stderr[-2000:]}")
    return done.stdout


def prompt_of(model: Path, text: Path) -> str:
    """Return the beginning of a text that has at most PROMPT tokens."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer(text.read_text()[:20_000]).input_ids[: PROMPT - 1]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def measure(name: str, model: Path, prompt: str, scratch: Path) -> dict[str, str]:
    """Time one directory."""
    start = time.perf_counter()
    command("warm", model)
    warmed = time.perf_counter()
    found = json.loads(command("generate", model, "--prompt", prompt, "--max-new-tokens", NEW, "--json"))
    ended = time.perf_counter()
    step = scratch / "step.csv"
    command("bench", "model", model, "--prompt", PROMPT, "--new", NEW, "--out", step)
    captured = read_rows(step)[-1]
    print(name, found["decode_tokens_per_second"], captured, file=sys.stderr, flush=True)
    return {
        "format": name,
        "warm_seconds": f"{warmed - start:.1f}",
        "wall_seconds": f"{ended - warmed:.1f}",
        "load_seconds": f"{found['load_seconds']:.2f}",
        "compile_seconds": f"{found['compile_seconds']:.2f}",
        "first_token_ms": f"{1e3 * found['first_token_seconds']:.1f}",
        "generate_ms_per_token": f"{1e3 / found['decode_tokens_per_second']:.3f}",
        "captured_ms_per_token": captured["decode_ms"],
    }


def main() -> None:
    """Write a row per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    dense = options.scratch / "dense"
    if not dense.exists():
        write_model(options.arch, options.blocks, options.data, dense)
    prompt = prompt_of(dense, options.data / "text" / "pycode-eval.txt")
    rows = []
    for name, how in FORMATS.items():
        model = dense
        if how is not None:
            model = options.scratch / name.replace(" ", "-").replace(":", "-")
            recipe, settings = how
            sets = [part for setting in settings for part in ("--set", setting)]
            command("compress", dense, "--recipe", recipe, *sets, "--out", model)
        rows.append(
            {"arch": options.arch, "blocks": str(options.blocks), **measure(name, model, prompt, options.scratch)}
        )
        write_rows(options.out, rows, COLUMNS)


if __name__ == "__main__":
    main()
