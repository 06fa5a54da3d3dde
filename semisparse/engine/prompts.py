"""Prompts as CUDA graphs: a prompt of some hundred tokens takes the host longer to launch than the GPU to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semisparse.engine.decoder import Cache, Decoder
from semisparse.formats.kernel import bucket_of
from semisparse.runtime.capture import capture_stream

MAX_TOKENS = 512
"""Most tokens, padding included, of a batch that is captured. Eight blocks of llama2-7b take 2.9 ms for 512 tokens if
captured, and 3.6 ms launched from Python. For 1,024 tokens they take 5.8 and 6.2 ms (H200, results/h200/blocks.csv):
padding to the next bucket may take more than that gains."""


def captured_length(lengths: Sequence[int], cache: Cache) -> int | None:
    """Return the length that a captured batch of prompts is padded to, or None if the batch is launched from Python.

    Args:
        lengths: tokens of each prompt.
        cache: the cache that the prompts are written to; padding takes positions in it, too.
    """
    padded = bucket_of(max(lengths))
    return padded if len(lengths) * padded <= MAX_TOKENS and padded <= cache.length else None


class CapturedPrompts:
    """The pass over prompts of one length, captured in a CUDA graph.

    Args:
        decoder: runs the prompts; its kernels for so many tokens are loaded.
        cache: of as many sequences as there are prompts.
        length: tokens per prompt, shorter prompts are padded.
        logits: [prompts, vocabulary], to which the graph writes; all graphs of a decoder may share it.
        pool: what `torch.cuda.graph_pool_handle` returns: memory that the graphs of a decoder share.
    """

    def __init__(self, decoder: Decoder, cache: Cache, length: int, logits: Tensor, pool: Any) -> None:
        self._logits = logits
        self._tokens = torch.zeros(cache.sequences, length, dtype=torch.int64, device=decoder.device)
        self._last = torch.zeros(cache.sequences, dtype=torch.int64, device=decoder.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decoder.padded_prompt(self._tokens, self._last, cache)  # loads what has not been loaded yet
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool, capture_stream(), "thread_local"):  # other threads may allocate
            self._logits.copy_(decoder.padded_prompt(self._tokens, self._last, cache))

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts, which begin at position 0.

        Args:
            prompts: token ids of each prompt.
        Returns:
            [prompts, vocabulary], the logits after each prompt.
        """
        length = self._tokens.shape[1]
        self._tokens.copy_(torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts]))
        self._last.copy_(torch.tensor([len(prompt) - 1 for prompt in prompts]))
        self._graph.replay()
        return self._logits.clone()  # other graphs write to it, too
