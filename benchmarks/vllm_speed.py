"""Latency and throughput of known shapes in vLLM, random weights: dense, vLLM's own low bits, and our formats.

    python benchmarks/vllm_speed.py results/h200/vllm.csv --model llama2-7b --columns dense,fp8,bitmask+gqs-w4s50

vLLM's own benchmark functions measure (`vllm bench latency`, `vllm bench throughput`), several of them on one engine.
Columns joined by commas start side by side, which saves time, and are then measured one after another; `+` begins the
next group. Its checkpoints are written and its processes import vLLM while the first group starts.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_checkpoints import COLUMNS, INT4, MODELS, RIVALS, config_of, write_dense
from vllm_engine import (
    BATCHES,
    LATENCY,
    LONG_PROMPT,
    LONG_PROMPTS,
    MEAN_OUTPUT,
    MEAN_PROMPT,
    REQUESTS,
    STEPS,
    KernelTime,
    chat_lengths,
    profile_step,
    step_ms,
    throughput_seconds,
    weight_bytes,
)

ENGINE: dict[str, Any] = {
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
}
"""Engine arguments of every column; the cache's size is given, because several engines share the GPU."""

FUSED = "-fused"
"""A column of ours with this ending is served with `semisparse.integrations.vllm.fusion`."""


@dataclass(frozen=True)
class Row:
    """A row of the CSV: one way to store the weights.

    Args:
        model: the model whose shapes the layers have.
        layers: decoder layers.
        weights: the column's name.
        weight_gib: GPU memory that loading the weights took, as vLLM measures it.
        start_s: seconds until the engine took requests, while the other engines started.
        latency_s: of `LATENCY`, `vllm bench latency`: 512 tokens in, 128 out, batch 1.
        first_token_s: the same with one token out.
        step_ms: the time per token between the two.
        step_ms_8: the time per step of 8 sequences, 64 tokens in and 64 out.
        step_ms_32: of 32.
        step_ms_128: of 128.
        requests_per_second: of `REQUESTS` requests at once, `vllm bench throughput`.
        output_tokens_per_second: of the same.
        prompt_tokens_per_second: of `LONG_PROMPTS` prompts of `LONG_PROMPT` tokens, one token out each.
        cache_gib: of the KV cache.
        machine: the GPU.
        software: versions.
    """

    model: str
    layers: int
    weights: str
    weight_gib: float
    start_s: float
    latency_s: float
    first_token_s: float
    step_ms: float
    step_ms_8: float
    step_ms_32: float
    step_ms_128: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    cache_gib: int
    machine: str
    software: str


@dataclass(frozen=True)
class ProfileRow(KernelTime):
    """A row of the profile's CSV.

    Args:
        model: as in `Row`.
        weights: as in `Row`.
        machine: the GPU.
    """

    model: str
    weights: str
    machine: str


def folder_of(column: str, args: Namespace) -> Path:
    """Return where a column's checkpoint is written; vLLM's cache of compiled code depends on it."""
    return Path(args.scratch) / f"{args.model}-{column.replace(':', '-')}"


def write_checkpoint(column: str, args: Namespace) -> dict[str, Any]:
    """Write a column's checkpoint, or only its config.json, and return the engine's arguments."""
    folder, settings = folder_of(column, args), {**ENGINE, "kv_cache_memory_bytes": args.cache << 30}
    folder.mkdir(parents=True, exist_ok=True)
    if column.endswith(FUSED):
        column = column.removesuffix(FUSED)
        settings["additional_config"] = {"semisparse_fusion": True}
    if column in COLUMNS:
        if not (folder / "config.json").exists():
            write = [sys.executable, Path(__file__).with_name("vllm_checkpoints.py"), column, folder]
            layers = [] if args.layers is None else ["--layers", str(args.layers)]
            subprocess.run([*write, "--model", args.model, *layers], check=True)
        return settings
    write_dense(folder, config_of(args.model, args.layers), INT4 if column == "int4" else None)
    return {**settings, "load_format": "dummy", **RIVALS[column]}


def say(word: str, text: str) -> None:
    """Tell the parent something: a line that begins with a word of its own."""
    print(word, text, flush=True)


def measure(column: str, args: Namespace) -> None:
    """Start a column's engine, and measure; each waits for a line on stdin. Rows are printed as JSON."""
    settings = write_checkpoint(column, args)
    import torch
    import vllm

    say("staged", column)
    sys.stdin.readline()
    model, started = str(folder_of(column, args)), time.perf_counter()
    engine = vllm.LLM(model, **settings)
    start_s = time.perf_counter() - started
    vllm.LLM.from_engine_args = classmethod(lambda cls, engine_args: engine)  # both benchmarks use this engine
    say("ready", f"{column} {start_s:.0f} s")
    sys.stdin.readline()
    if column in args.profile.split(","):
        machine = torch.cuda.get_device_name()
        rows = [
            ProfileRow(**asdict(row), model=args.model, weights=column, machine=machine) for row in profile_step(engine)
        ]
        say("profile", json.dumps([asdict(row) for row in rows]))
    whole, first, single = step_ms(model, LATENCY)
    steps = [round(step_ms(model, {**STEPS, "batch-size": batch})[2], 3) for batch in BATCHES]
    outputs = chat_lengths(MEAN_OUTPUT, 2)
    chat = throughput_seconds(chat_lengths(MEAN_PROMPT, 1), outputs, model)
    long = min(throughput_seconds([LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS, model) for _ in range(2))
    row = Row(
        args.model,
        config_of(args.model, args.layers).num_hidden_layers,
        column,
        round(engine.collective_rpc(weight_bytes)[0] / 2**30, 2),
        round(start_s, 1),
        round(whole, 4),
        round(first, 4),
        round(single, 3),
        *steps,
        round(REQUESTS / chat, 2),
        round(sum(outputs) / chat),
        round(LONG_PROMPTS * LONG_PROMPT / long),
        args.cache,
        torch.cuda.get_device_name(),
        f"vllm {vllm.__version__}, torch {torch.__version__}",
    )
    say("row", json.dumps(asdict(row)))


def add(path: Path, kind: type[Any], rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, with its header if it is new.

    Raises:
        SystemExit: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new, names = not path.exists(), [field.name for field in fields(kind)]
    if not is_new and path.read_text().partition("\n")[0] != ",".join(names):
        raise SystemExit(f"{path} has other columns than {', '.join(names)}: give another file")
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            table.writeheader()
        table.writerows(rows)


class Column:
    """A process that serves one column.

    Args:
        name: the column's.
        args: the command line.
    """

    def __init__(self, name: str, args: Namespace) -> None:
        self.name, self.args = name, args
        command = [sys.executable, __file__, "--measure", name, "--model", args.model, "--scratch", args.scratch]
        command += ["--cache", str(args.cache), "--profile", args.profile]
        command += [] if args.layers is None else ["--layers", str(args.layers)]
        self.log = Path(args.scratch) / f"vllm-{args.model}-{name.replace(':', '-')}.log"
        streams = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **streams},
            stderr=self.log.open("w"),
            text=True,
        )

    def wait_for(self, word: str) -> str | None:
        """Return the next line that begins with a word, and print it; None if the process ends without one."""
        found = next((line.strip() for line in self.process.stdout if line.startswith(word + " ")), None)
        print(found or f"{self.name}: no {word}, see {self.log}", f"({time.strftime('%X')})", flush=True)
        return None if found is None else found.removeprefix(word + " ")

    def go(self) -> None:
        """Let the process do its next step; nothing happens if it has ended."""
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def measure(self) -> None:
        """Measure, write the rows, and wait for the process to end."""
        self.go()
        if self.name in self.args.profile.split(","):
            profile = self.wait_for("profile")
            add(self.args.out.with_name("vllm-kernels.csv"), ProfileRow, json.loads(profile or "[]"))
        row = self.wait_for("row")
        if row:
            add(self.args.out, Row, [json.loads(row)])
        self.process.stdin.close()
        self.process.wait()


def run(args: Namespace) -> None:
    """Measure every column, group by group."""
    groups = [[Column(name, args) for name in group.split(",")] for group in args.columns.split("+")]
    for i, group in enumerate(groups):
        for column in group:
            column.wait_for("staged")
            column.go()
        for later in groups[1:] if i == 0 else []:
            for column in later:
                column.wait_for("staged")
        for column in group:
            column.wait_for("ready")
        for column in group:
            column.measure()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--columns", default="dense,fp8,int4,bitmask,gqs-w4s50")
    parser.add_argument("--model", choices=MODELS, default="llama2-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--cache", type=int, default=16, help="GiB of KV cache per engine")
    parser.add_argument("--scratch", default="/tmp/vllm", help="where checkpoints and logs are written")
    parser.add_argument(
        "--profile", action="store_true", help="also profile a decode step, to vllm-kernels.csv beside it"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.scratch).mkdir(parents=True, exist_ok=True)
    if args.measure:
        measure(args.measure, args)
    else:
        run(args)


if __name__ == "__main__":
    main()
