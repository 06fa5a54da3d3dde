"""Latency and throughput of llama2-7b's shapes in vLLM, random weights: dense, vLLM's own low bits, and our formats.

    python benchmarks/vllm_speed.py results/h200/vllm.csv --columns dense,fp8,bitmask,gqs-w4s50

vLLM's own benchmark functions measure (`vllm bench latency`, `vllm bench throughput`), several of them on one engine.
The engines of a call start side by side, which saves time, and are then measured one after another.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_checkpoints import COLUMNS, INT4, RIVALS, write_dense

LATENCY = (
    "--batch-size",
    "1",
    "--input-len",
    "512",
    "--output-len",
    "128",
    "--num-iters-warmup",
    "2",
    "--num-iters",
    "5",
)

REQUESTS, MEAN_PROMPT, MEAN_OUTPUT, SPREAD, LONGEST = 200, 220, 200, 1.0, 1024
"""Lengths as in ShareGPT: log-normal with these means, deviation ``SPREAD`` of the logarithm, cut at ``LONGEST``."""

LONG_PROMPTS, LONG_PROMPT = 32, 2048

ENGINE: dict[str, Any] = {
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
}
"""Engine arguments of every column; the cache's size is given, because several engines share the GPU."""


@dataclass(frozen=True)
class Row:
    """A row of the CSV: one way to store the weights.

    Args:
        weights: the column's name.
        layers: decoder layers.
        weight_gib: GPU memory that loading the weights took, as vLLM measures it.
        start_s: seconds until the engine took requests, while the other engines started.
        latency_s: of `LATENCY`, `vllm bench latency`: 512 tokens in, 128 out, batch 1.
        first_token_s: the same with one token out.
        step_ms: the time per token between the two.
        requests_per_second: of `REQUESTS` requests at once, `vllm bench throughput`.
        output_tokens_per_second: of the same.
        prompt_tokens_per_second: of `LONG_PROMPTS` prompts of `LONG_PROMPT` tokens, one token out each.
        machine: the GPU.
        software: versions.
    """

    weights: str
    layers: int
    weight_gib: float
    start_s: float
    latency_s: float
    first_token_s: float
    step_ms: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    machine: str
    software: str


def requests_of(prompts: list[int], outputs: list[int]) -> list[Any]:
    """Return requests of random tokens with these lengths."""
    from vllm.benchmarks.datasets import SampleRequest

    draw = random.Random(1)
    return [
        SampleRequest(
            prompt={"prompt_token_ids": [draw.randrange(32000) for _ in range(prompt)]},
            prompt_len=prompt,
            expected_output_len=output,
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def chat_lengths(mean: int, seed: int) -> list[int]:
    """Return a length for each of `REQUESTS`."""
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0, SPREAD) for _ in range(REQUESTS)]
    scale = mean * REQUESTS / sum(drawn)
    return [min(LONGEST, max(4, round(scale * each))) for each in drawn]


def seconds(prompts: list[int], outputs: list[int], model: str) -> float:
    """Return the seconds that `vllm bench throughput` takes for requests of these lengths."""
    from vllm.benchmarks.throughput import run_vllm
    from vllm.engine.arg_utils import EngineArgs

    return float(run_vllm(requests_of(prompts, outputs), 1, EngineArgs(model=model), False, disable_detokenize=True)[0])


def latency(arguments: tuple[str, ...], model: str) -> float:
    """Return the mean seconds per batch of `vllm bench latency`."""
    from vllm.benchmarks import latency as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        bench.main(parser.parse_args(["--model", model, *arguments, "--disable-detokenize", "--output-json", out.name]))
        return float(json.loads(Path(out.name).read_text())["avg_latency"])


def weight_bytes(worker: Any) -> int:
    """Return the bytes that loading the weights took, of vLLM's worker."""
    return int(worker.model_runner.model_memory_usage)


def measure(column: str, args: Namespace) -> None:
    """Start a column's engine, report that, wait for a line on stdin, measure, and print the row as JSON."""
    import torch
    import vllm

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder, settings = Path(scratch), dict(ENGINE)
        if column in COLUMNS:
            write = Path(__file__).with_name("vllm_checkpoints.py")
            subprocess.run([sys.executable, write, column, scratch, "--layers", str(args.layers)], check=True)
        else:
            write_dense(folder, args.layers, INT4 if column == "int4" else None)
            settings |= {"load_format": "dummy", **RIVALS[column]}
        settings["kv_cache_memory_bytes"] = args.cache << 30
        started = time.perf_counter()
        engine = vllm.LLM(scratch, **settings)
        start_s = time.perf_counter() - started
        vllm.LLM.from_engine_args = classmethod(lambda cls, engine_args: engine)  # both benchmarks use this engine
        print("ready", column, f"{start_s:.0f} s", flush=True)
        sys.stdin.readline()
        whole = latency(LATENCY, scratch)
        first = latency((*LATENCY, "--output-len", "1"), scratch)
        outputs = chat_lengths(MEAN_OUTPUT, 2)
        chat = seconds(chat_lengths(MEAN_PROMPT, 1), outputs, scratch)
        long = min(seconds([LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS, scratch) for _ in range(2))
        weights = engine.collective_rpc(weight_bytes)[0]
    row = Row(
        weights=column,
        layers=args.layers,
        weight_gib=round(weights / 2**30, 2),
        start_s=round(start_s, 1),
        latency_s=round(whole, 4),
        first_token_s=round(first, 4),
        step_ms=round((whole - first) / 127 * 1e3, 3),
        requests_per_second=round(REQUESTS / chat, 2),
        output_tokens_per_second=round(sum(outputs) / chat),
        prompt_tokens_per_second=round(LONG_PROMPTS * LONG_PROMPT / long),
        machine=torch.cuda.get_device_name(),
        software=f"vllm {vllm.__version__}, torch {torch.__version__}",
    )
    print("row", json.dumps(asdict(row)), flush=True)


def run(args: Namespace) -> None:
    """Start every column's engine, then let one after another measure, and write its row when it is done."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--layers", str(args.layers), "--cache", str(args.cache)]
    command += ["--scratch", args.scratch]
    running = {
        column: subprocess.Popen(
            [*command, "--measure", column],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
            stderr=log_of(column, args).open("w"),
            text=True,
        )
        for column in args.columns.split(",")
    }
    for column, process in running.items():
        print(read(process, "ready") or f"{column} did not start: see {log_of(column, args)}", flush=True)
    for column, process in running.items():
        row = None
        if process.poll() is None:
            process.stdin.write("go\n")
            process.stdin.flush()
            row = read(process, "row")
            process.stdin.close()
            process.wait()
        print(row or f"{column} was not measured: see {log_of(column, args)}", flush=True)
        if row:
            is_new = not args.out.exists()
            with args.out.open("a", newline="") as file:
                table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
                if is_new:
                    table.writeheader()
                table.writerow(json.loads(row.removeprefix("row ")))


def log_of(column: str, args: Namespace) -> Path:
    """Return the file that receives vLLM's output for a column."""
    return Path(args.scratch) / f"vllm-{column.replace(':', '-')}.log"


def read(process: subprocess.Popen[str], word: str) -> str | None:
    """Return the next line of a process that begins with ``word``; None if it ends without one."""
    return next((line.strip() for line in process.stdout if line.startswith(word + " ")), None)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--columns", default=",".join([*RIVALS, *COLUMNS]))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cache", type=int, default=16, help="GiB of KV cache per engine")
    parser.add_argument("--scratch", default="/tmp", help="where checkpoints and logs are written")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args)
    else:
        run(args)


if __name__ == "__main__":
    main()
