"""Generate text with a model, and measure the speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse.errors import InputError


@dataclass(frozen=True)
class Generation:
    """A greedy continuation.

    Args:
        text: the prompt and its continuation.
        new_tokens: tokens generated.
        seconds: wall time of the whole call, prompt included.
    """

    text: str
    new_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time."""
        return self.new_tokens / self.seconds


@torch.no_grad()
def generate_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int
) -> Generation:
    """Continue a prompt greedily, with batch size 1.

    Args:
        model: a causal language model.
        tokenizer: of the model.
        prompt: text.
        max_new_tokens: tokens to generate at most, 1 or more.

    Raises:
        InputError: the prompt is empty, prompt and continuation exceed the model's context, or ``max_new_tokens`` < 1.
    """
    if max_new_tokens < 1:
        raise InputError(f"max-new-tokens is {max_new_tokens}; it is at least 1")
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    if ids.shape[1] == 0:
        raise InputError("the prompt is empty; give at least one token of text")
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and ids.shape[1] + max_new_tokens > context:
        raise InputError(
            f"{ids.shape[1]} prompt tokens and {max_new_tokens} new ones exceed the model's context of {context}"
        )
    model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)  # loads and compiles the kernels
    start = time.perf_counter()
    out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    return Generation(text, out.shape[1] - ids.shape[1], seconds)
