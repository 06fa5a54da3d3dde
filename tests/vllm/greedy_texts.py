"""Greedy texts of a model in vLLM's engine and in transformers, compared token by token."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from semisparse.demo import HELD_OUT
from tests.models import SHARED

DEVICE = "cuda"

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 16, 64

TEXTS = {
    "demo": HELD_OUT,
    "stories260k": SHARED / "text" / "tinystories-eval.jsonl",
    "babyllama-1m": SHARED / "text" / "tinystories-eval.jsonl",
    "pycode-11m": SHARED / "text" / "pycode-eval.txt",
}
"""The trained models, and a text that fits each."""


@dataclass(frozen=True)
class Generated:
    """Greedy tokens [PROMPTS, NEW_TOKENS], and the log-probability of each.

    vLLM's have a fifth row: the first prompt again, and how many of its tokens were in the prefix cache.
    """

    tokens: Tensor
    logprobs: Tensor
    cached: int = 0


def prompts_of(directory: Path, name: str, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """The first tokens of some pieces of the text that fits a model."""
    text = TEXTS[name].read_text()
    tokens = AutoTokenizer.from_pretrained(directory)(text[:20_000], add_special_tokens=False).input_ids
    return [tokens[start : start + length] for start in range(0, 200 * PROMPTS, 200)]


@torch.no_grad()
def by_transformers(directory: Path, prompts: list[list[int]], dtype: torch.dtype) -> Generated:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(DEVICE).eval()
    output = model.generate(
        torch.tensor(prompts, device=DEVICE),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, len(prompts[0]) :].cpu()
    logprobs = torch.stack(output.logits, 1).float().log_softmax(-1).cpu()
    return Generated(tokens, logprobs.gather(-1, tokens[..., None])[..., 0])


@torch.no_grad()
def in_float32(directory: Path, prompts: list[list[int]], tokens: Tensor) -> Tensor:
    """The log-probabilities [PROMPTS, NEW_TOKENS, vocabulary] before each token, activations in float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logits = model(torch.cat([torch.tensor(prompts), tokens], 1)).logits
    return logits[:, len(prompts[0]) - 1 : -1].log_softmax(-1)


def by_vllm(directory: Path, prompts: list[list[int]], dtype: torch.dtype, **engine: Any) -> Generated:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"max_model_len": 128, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28, **engine}
    llm = LLM(str(directory), dtype=str(dtype).removeprefix("torch."), **settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        # One prompt again, alone: its decode steps are of one token.
        alone = llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    rows = [output.outputs[0] for output in [*outputs, *alone]]
    tokens = torch.tensor([row.token_ids for row in rows])
    logprobs = [[step[token].logprob for step, token in zip(row.logprobs, row.token_ids, strict=True)] for row in rows]
    return Generated(tokens, torch.tensor(logprobs), alone[0].num_cached_tokens)


def compare(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    least: int = NEW_TOKENS,
    length: int = PROMPT_TOKENS,
    **engine: Any,
) -> Generated:
    """Compare vLLM's tokens and log-probabilities with transformers'; ``least`` tokens must be equal. Return vLLM's.

    Both round to ``dtype`` after every operation, in another order. So they may differ by what either differs from
    float32, and another token may follow only where float32 gives both the same log-probability, within that tolerance.
    """
    prompts = prompts_of(directory, name, length)
    found, same = by_vllm(directory, prompts, dtype, **engine), 0
    expected = by_transformers(directory, prompts, dtype)
    exact = in_float32(directory, prompts, expected.tokens)
    chosen = exact.gather(-1, expected.tokens[..., None])[..., 0]
    tolerance = 3 * float((expected.logprobs - chosen).abs().max()) + 1e-4
    for row, prompt in enumerate([*range(PROMPTS), 0]):
        for step in range(NEW_TOKENS):
            token, wanted = int(found.tokens[row, step]), int(expected.tokens[prompt, step])
            if token != wanted:
                margin = float(exact[prompt, step, wanted] - exact[prompt, step, token])
                assert abs(margin) <= tolerance, f"prompt {row}, token {step}: {token}, not {wanted} ({margin:.4f})"
                break
            difference = float(found.logprobs[row, step] - expected.logprobs[prompt, step])
            assert abs(difference) <= tolerance, f"prompt {row}, token {step}: {difference:.5f} of {tolerance:.5f}"
            same += 1
    print(f"{directory.name} {dtype}: {same} of {(PROMPTS + 1) * NEW_TOKENS} tokens equal, tolerance {tolerance:.4f}")
    assert same >= least
    return found
