"""A server of vLLM, and what `vllm bench serve` measures of it; `benchmarks/vllm_speed.py` runs both in processes.

Requests are of token ids, drawn as in `benchmarks/vllm_requests.py`; they arrive as a Poisson process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_cache import use_shared_cache
from vllm_process import Turn
from vllm_requests import MEAN_OUTPUT, MEAN_PROMPT, chat_lengths, requests_of


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


def wait_until_up(turn: Turn, port: int) -> None:
    """Tell the parent when a server takes requests. It sleeps at first, so that no lock is held while vLLM forks."""
    time.sleep(12)
    while True:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
        except OSError:
            time.sleep(0.3)
        else:
            turn.say("ready")
            return


def run_server(turn: Turn, folder: Path, settings: dict[str, Any], cache: Any, port: int) -> None:
    """Run ``vllm serve`` until the process is killed.

    Args:
        turn: the connection to the parent.
        folder: the checkpoint.
        settings: of the engine.
        cache: what opens the KV cache.
        port: where it listens.
    """
    turn.wait()
    from vllm.entrypoints.cli.main import main

    use_shared_cache(cache)
    write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    flags = ["--no-enable-prefix-caching", "--uvicorn-log-level", "error"]
    for name, value in settings.items():
        if name != "enable_prefix_caching":
            flags += ["--" + name.replace("_", "-"), json.dumps(value) if isinstance(value, dict) else str(value)]
    sys.argv = ["vllm", "serve", str(folder), "--port", str(port), *flags]
    threading.Thread(target=wait_until_up, args=(turn, port), daemon=True).start()
    main()


def measure_server(turn: Turn, folder: Path, port: int, rate: int, requests: int) -> None:
    """Send what ``vllm bench serve`` measures at one rate to the parent, as the fields of `ServeRow`.

    It starts side by side with others, and waits for its turn when only the requests are left to be sent.
    """
    import torch
    import vllm
    from vllm.benchmarks import serve as bench
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    drawn = requests_of(chat_lengths(MEAN_PROMPT, 1, requests), chat_lengths(MEAN_OUTPUT, 2, requests))
    samples = [SampleRequest(r.prompt["prompt_token_ids"], r.prompt_len, r.expected_output_len) for r in drawn]

    def samples_in_turn(*_: Any) -> list[Any]:
        turn.say("prepared")
        turn.wait()
        return samples

    bench.get_samples = samples_in_turn
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    given = {"model": folder, "port": port, "request-rate": rate, "num-prompts": requests, "dataset-name": "sharegpt"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    found = bench.main(parser.parse_args([*words, "--ignore-eos", "--disable-tqdm", "--num-warmups", "4"]))
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "output_throughput")
    fields = (*names[:-1], "output_tokens_per_second")
    turn.say(
        "done",
        {
            "requests": int(found["completed"]),
            **{field: round(float(found[name]), 2) for field, name in zip(fields, names, strict=True)},
            "machine": current_platform.get_device_name(),
            "software": f"vllm {vllm.__version__}, torch {torch.__version__}",
        },
    )
