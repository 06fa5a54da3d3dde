"""Latency under load: `vllm serve` with known shapes and random weights, and `vllm bench serve` at several rates.

    python benchmarks/vllm_serve.py results/h200/vllm-serve.csv --columns dense,int4,bitmask,gqs-w4s50

The servers start side by side, and are then measured one after another. Requests are of token ids, drawn as in
`benchmarks/vllm_engine.py`; they arrive as a Poisson process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_checkpoints import MODELS
from vllm_engine import MEAN_OUTPUT, MEAN_PROMPT, chat_lengths, requests_of
from vllm_speed import ENGINE, add, folder_of, write_checkpoint

FIRST_PORT = 8100


@dataclass(frozen=True)
class ServeRow:
    """A row of the CSV: one rate of requests.

    Args:
        model: the model whose shapes the layers have.
        weights: the column's name, as in `benchmarks/vllm_speed.py`.
        rate: requests per second.
        requests: their number.
        mean_ttft_ms: from a request to its first token.
        p99_ttft_ms: the same.
        mean_tpot_ms: per further token.
        p99_tpot_ms: the same.
        output_tokens_per_second: of all requests.
        machine: the GPU.
        software: versions.
    """

    model: str
    weights: str
    rate: float
    requests: int
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    output_tokens_per_second: float
    machine: str
    software: str


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with one word per token id: the server makes text of what it generates."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def start(column: str, port: int, args: Namespace) -> subprocess.Popen[bytes]:
    """Start the server of a column."""
    settings = {**write_checkpoint(column, args)}
    for name in ENGINE:
        settings.pop(name)
    flags = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--max-model-len", str(ENGINE["max_model_len"]), "--no-enable-prefix-caching"]
    flags += ["--gpu-memory-utilization", str(ENGINE["gpu_memory_utilization"]), "--uvicorn-log-level", "error"]
    folder = folder_of(column, args)
    write_tokenizer(folder, MODELS[args.model][1]["vocab_size"])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", str(port), *flags]
    log = Path(args.scratch) / f"serve-{folder.name}.log"
    return subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)


def wait_until_up(server: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether a server takes requests, once it does or has ended."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
        except OSError:
            time.sleep(0.3)
        else:
            return True
    return False


def measure(folder: Path, port: int, rate: float, requests: int) -> dict[str, Any]:
    """Return what ``vllm bench serve`` measures at one rate."""
    from vllm.benchmarks import serve as bench
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    drawn = requests_of(chat_lengths(MEAN_PROMPT, 1, requests), chat_lengths(MEAN_OUTPUT, 2, requests))
    samples = [SampleRequest(r.prompt["prompt_token_ids"], r.prompt_len, r.expected_output_len) for r in drawn]
    bench.get_samples = lambda *_: samples
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    given = {"model": folder, "port": port, "request-rate": rate, "num-prompts": requests, "dataset-name": "sharegpt"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return dict(bench.main(parser.parse_args([*words, "--ignore-eos", "--disable-tqdm", "--num-warmups", "4"])))


def measure_column(column: str, server: subprocess.Popen[bytes], port: int, args: Namespace) -> None:
    """Measure a server at every rate, write a row for each, and end it."""
    import torch
    import vllm

    for pair in args.rates.split(",") if server.poll() is None else ():
        rate, requests = map(int, pair.split("x"))
        found = measure(folder_of(column, args), port, rate, requests)
        names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "output_throughput")
        values = [round(float(found[name]), 2) for name in names]
        software = f"vllm {vllm.__version__}, torch {torch.__version__}"
        done = int(found["completed"])
        row = ServeRow(args.model, column, rate, done, *values, torch.cuda.get_device_name(), software)
        add(args.out, ServeRow, [asdict(row)])
        print(time.strftime("%X"), column, rate, *values, flush=True)
    server.terminate()
    server.wait()


def start_all(args: Namespace) -> list[tuple[str, subprocess.Popen[bytes], int]]:
    """Start the servers of all columns, and return each with its port once they take requests."""
    columns = args.columns.split(",")
    ports = [FIRST_PORT + i for i in range(len(columns))]
    with ThreadPoolExecutor(len(columns)) as pool:
        servers = list(pool.map(partial(start, args=args), columns, ports))
    for column, server, port in zip(columns, servers, ports, strict=True):
        print(time.strftime("%X"), column, "is up" if wait_until_up(server, port) else "did not start", flush=True)
    return list(zip(columns, servers, ports, strict=True))


def run(args: Namespace) -> None:
    """Measure every column at every rate."""
    for column, server, port in start_all(args):
        measure_column(column, server, port, args)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", default="dense,int4,bitmask,gqs-w4s50")
    parser.add_argument("--rates", default="4x120,16x480", help="requests per second x requests, comma-separated")
    parser.add_argument("--model", choices=MODELS, default="llama2-7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--cache", type=int, default=16, help="GiB of KV cache per server")
    parser.add_argument("--scratch", default="/tmp/vllm", help="where checkpoints and logs are written")
    args = parser.parse_args()
    Path(args.scratch).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    run(args)


if __name__ == "__main__":
    main()
