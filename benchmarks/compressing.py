"""Seconds and memory of compressing a model of random weights.

Usage: python benchmarks/compressing.py OUT.csv --data DATA --scratch DIR [--arch llama2-7b] [--blocks 32]
           [--runs sparsegpt,magnitude] [--limit-gb 8] [--ranks 2] [--parts PARTS.csv] [--samples N]

DATA holds models/pycode-11m, for its tokenizer, and text/pycode-calib.txt. Each run is a process of its own, with
`--limit-gb` in a memory cgroup of its own (memory_limit.py). `block_seconds` is the median over all decoder layers but
the first and the last; of two, it is that of the first. `search_seconds` is the time of a search, and `candidates` the
number of models that it scored. With `--ranks 2` torchrun starts two processes, with a GPU each, and the row is that of
the first. `anonymous_gb` is the peak host memory beside the page cache, `resident_gb` the peak
with it, `device_gb` the peak GPU memory that torch allocated. With `--parts` the parts of each decoder layer are timed,
too (stage_times.py), in a row each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from memory_limit import run_limited
from rows import read_rows, write_rows
from safetensors.torch import save_file
from stage_times import StageTimes, stage_times
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.api import joined_ranks
from semisparse.bench.shapes import architecture

RUNS = {
    "sparsegpt": ("rheosparse", ["search=none"], True, None),
    "magnitude": ("rheosparse", ["search=none", "prune=magnitude"], False, None),
    "profile": ("rheosparse", [], True, None),
    "evolution": ("rheosparse", ["search=evolution"], True, None),
    "dense-w4": ("dense-w4", ["tune=none"], True, None),
    "gqsa tune=bqpo": ("gqsa", ["tune=bqpo"], True, None),
    "gqsa": ("gqsa", [], True, None),
    "auto bits=3": ("auto", [], True, {"bits": 3}),
}
"""Recipe, settings, whether it reads calibration text, and targets."""

COLUMNS = (
    "build",
    "model",
    "blocks",
    "ranks",
    "run",
    "device",
    "limit",
    "seconds",
    "search_seconds",
    "candidates",
    "block_seconds",
    "last_stage_seconds",
    "anonymous_gb",
)
COLUMNS += ("resident_gb", "device_gb", "bytes_gb")
SHARDS = 8
"""Files of a written model, at most."""

PART_COLUMNS = ("ranks", "rank", "layer", "part", "seconds")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(arch: str, blocks: int, data: Path, out: Path) -> None:
    """Write a model directory with random weights, made on a GPU if there is one."""
    config = architecture(arch)
    config.num_hidden_layers = blocks
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.save_pretrained(out)
    tensors = list(model.state_dict().items())
    shards = [dict(tensors[start::SHARDS]) for start in range(min(SHARDS, len(tensors)))]
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(len(shards)) as pool:  # one thread writes some 0.5 GB/s
        list(pool.map(lambda shard, name: save_file(shard, out / name, {"format": "pt"}), shards, names))
    weight_map = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in TOKENIZER:
        shutil.copyfile(data / "models" / "pycode-11m" / name, out / name)


def print_now(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def held(key: str) -> float:
    """Return a line of this process's /proc status, in GB."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1e6


def device_gb() -> float:
    """Return the peak GPU memory that torch allocated, in GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def write_parts(path: Path, times: StageTimes) -> None:
    """Write the parts of each decoder layer that this rank has timed, to a file per rank."""
    rank = os.environ.get("RANK", "0")
    values = ((os.environ.get("WORLD_SIZE", "1"), rank, *key, f"{spent:.4f}") for key, spent in times.seconds.items())
    rows = [dict(zip(PART_COLUMNS, map(str, each), strict=True)) for each in sorted(values)]
    write_rows(path.with_name(f"{path.stem}-{rank}{path.suffix}"), rows, PART_COLUMNS)


def run(name: str, model: Path, data: Path, out: Path, samples: int | None, parts: Path | None) -> dict[str, str]:
    """Compress once, in this process."""
    recipe, settings, needs_text, target = RUNS[name]
    marks: list[tuple[float, str]] = []
    most = 0.0

    def watch() -> None:
        nonlocal most
        while True:
            most = max(most, held("RssAnon"))
            time.sleep(0.02)

    def progress(stage: str, done: int, total: int) -> None:
        if not marks or marks[-1][1] != stage or stage.startswith("search"):
            marks.append((time.perf_counter(), stage))
            spent, on_device = time.perf_counter() - started, device_gb()
            print(
                f"{spent:8.1f} s  host {most:.2f}  device {on_device:.1f} GB  {stage} {done}/{total}",
                file=sys.stderr,
                flush=True,
            )

    threading.Thread(target=watch, daemon=True).start()
    started = time.perf_counter()
    text = data / "text" / "pycode-calib.txt" if needs_text else None
    how: dict[str, Any] = {
        "recipe": recipe,
        "settings": settings,
        "target": target,
        "calibration": text,
        "samples": samples,
    }
    with joined_ranks(print_now), stage_times() if parts else contextlib.nullcontext() as times:
        report = semisparse.compress(model, out=out, progress=progress, inform=print_now, **how)
        ended = time.perf_counter()
    if times and parts:
        write_parts(parts, times)
    starts = [at for at, stage in marks if stage.startswith("decoder layer")]
    blocks = [after - before for before, after in pairwise(starts)]
    searching = [at for at, stage in marks if stage.startswith("search")]
    return {
        "run": name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": f"{ended - started:.1f}",
        "search_seconds": f"{starts[0] - searching[0]:.1f}" if searching else "",
        "candidates": str(report.search["evaluations"]) if report.search else "",
        "block_seconds": f"{statistics.median(blocks[1:] or blocks or [0]):.2f}",
        "last_stage_seconds": f"{ended - (starts or [started])[-1]:.1f}",
        "anonymous_gb": f"{most:.2f}",
        "resident_gb": f"{held('VmHWM'):.2f}",
        "device_gb": f"{device_gb():.1f}",
        "bytes_gb": f"{report.bytes_after / 1e9:.2f}",
    }


def main() -> None:
    """Append a row per run to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--runs", default="sparsegpt,magnitude")
    parser.add_argument("--build", default="now", help="a name for the code that is measured")
    parser.add_argument("--limit-gb", type=float, default=0, help="of host memory for each run; 0 for no limit")
    parser.add_argument("--ranks", type=int, default=1, help="processes, with a GPU each")
    parser.add_argument("--samples", type=int, help="calibration sequences; by default as `compress` takes")
    parser.add_argument("--parts", type=Path, help="time the parts of a decoder layer; a CSV per rank")
    parser.add_argument("--one", help="a run, in this process; prints its row as JSON")
    options = parser.parse_args()
    model = options.scratch / f"{options.arch}-{options.blocks}"
    if options.one:
        row = json.dumps(run(options.one, model, options.data, options.scratch / "out", options.samples, options.parts))
        if os.environ.get("RANK", "0") == "0":
            print(row)
        return
    if not model.exists():
        write_model(options.arch, options.blocks, options.data, model)
    rows = read_rows(options.out)
    for name in options.runs.split(","):
        for leftover in ("out", "out.partial"):
            shutil.rmtree(options.scratch / leftover, ignore_errors=True)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        command = [sys.executable, *(launch if options.ranks > 1 else []), __file__, *sys.argv[1:], "--one", name]
        found, limit = run_limited(command, options.limit_gb)
        rows.append(
            {
                "build": options.build,
                "model": options.arch,
                "blocks": str(options.blocks),
                "ranks": str(options.ranks),
                "limit": limit,
                **json.loads(found.splitlines()[-1]),
            }
        )
        write_rows(options.out, rows, COLUMNS)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
