"""Requests of random tokens, lengths as in a chat, and the time that vLLM takes for many at once."""

from __future__ import annotations

import random
from typing import Any

MEAN_PROMPT, MEAN_OUTPUT, SPREAD, LONGEST = 220, 200, 1.0, 1024
"""Lengths as in ShareGPT: log-normal with these means, deviation ``SPREAD`` of the logarithm, cut at ``LONGEST``."""


def chat_lengths(mean: int, seed: int, count: int) -> list[int]:
    """Return a length for each request."""
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0, SPREAD) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [min(LONGEST, max(4, round(scale * each))) for each in drawn]


def token_ids(count: int, draw: random.Random) -> list[int]:
    """Return random token ids."""
    return [draw.randrange(32000) for _ in range(count)]


def requests_of(prompts: list[int], outputs: list[int]) -> list[Any]:
    """Return requests of random tokens with these lengths."""
    from vllm.benchmarks.datasets import SampleRequest

    draw = random.Random(1)
    return [
        SampleRequest({"prompt_token_ids": token_ids(prompt, draw)}, prompt_len=prompt, expected_output_len=output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def throughput_seconds(prompts: list[int], outputs: list[int], model: str) -> float:
    """Return the seconds that ``vllm bench throughput`` takes for requests of these lengths."""
    from vllm.benchmarks.throughput import run_vllm
    from vllm.engine.arg_utils import EngineArgs

    return float(run_vllm(requests_of(prompts, outputs), 1, EngineArgs(model=model), False, disable_detokenize=True)[0])
