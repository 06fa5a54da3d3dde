"""Speculative decoding: draft tokens are verified in one decoder step.

They are looked up in the text so far (prompt lookup), or come from a draft model (draft_model.py). Draft tokens
before the first that differs from the model's argmax are accepted, so the output is that of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from semisparse.engine.decoder import Decoder
from semisparse.engine.state import State
from semisparse.runtime.capture import capture_stream

NGRAMS = (3, 2, 1)
"""Lengths of the n-grams at the text's end that are looked up, the longest first."""


def look_up(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to ``count`` draft tokens: those that followed when the text's last n-gram occurred before.

    The lengths in `NGRAMS` are tried in order; the first n-gram that also occurs earlier is taken, and of its earlier
    occurrences the last. Empty if none occurs earlier.
    """
    for length in NGRAMS:
        last = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == last:
                return list(tokens[start + length : start + length + count])
    return []


class Verifier:
    """Runs decoder steps of several tokens per sequence; on a GPU as a CUDA graph.

    Args:
        decoder: the model.
        state: the decode state; the step writes to its KV cache.
        width: tokens per sequence and step.
    """

    def __init__(self, decoder: Decoder, state: State, width: int) -> None:
        sequences, device = state.cache.sequences, decoder.device
        self._tokens = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._offsets = torch.arange(width, dtype=torch.int32)
        self._positions = self._offsets.to(device).repeat(sequences, 1)
        self._argmax = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

        def step() -> None:
            logits = decoder.step(self._tokens, self._positions.flatten(), state.cache)
            self._argmax.copy_(logits.argmax(-1).view_as(self._argmax))

        self._step = step

    def __call__(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Return the argmax token after each input token.

        Args:
            tokens: [rows, width] int64, in host memory; rows may be fewer than the state has sequences.
            first: [rows] int32, the position of each sequence's first input token.
        Returns:
            [rows, width] int64, in host memory.
        """
        rows = len(tokens)
        self._tokens[:rows].copy_(tokens)
        self._positions[:rows].copy_(first[:, None] + self._offsets)
        if self._tokens.device.type != "cuda":
            self._step()
        elif self._graph is None:
            self._step()  # loads the kernels; the replay below overwrites the same positions of the cache
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=capture_stream()):
                self._step()
            graph.replay()
            self._graph = graph
        else:
            self._graph.replay()
        return self._argmax[:rows].to("cpu", copy=True)


Propose = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(texts, count) -> up to ``count`` draft tokens for each text."""


def look_up_all(texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return what `look_up` returns for each text."""
    return [look_up(text, count) for text in texts]


def speculated(
    verify: Verifier,
    propose: Propose,
    prompts: Sequence[Sequence[int]],
    first: Sequence[int],
    new: int,
    proposals: int,
) -> Iterator[list[int]]:
    """Yield ``new`` lists, each with the next token of every sequence: the same as greedy decoding.

    Args:
        verify: runs the model for ``proposals`` + 1 tokens per sequence; its cache holds the prompts.
        propose: returns the draft tokens.
        prompts: token ids of each sequence's prompt.
        first: the first new token of each sequence.
        new: tokens to generate per sequence, the first included.
        proposals: maximum draft tokens per sequence and step.
    """
    texts = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    yielded = 0
    while yielded < new:
        while yielded < new and all(len(text) > start + yielded for text, start in zip(texts, starts, strict=True)):
            yield [text[start + yielded] for text, start in zip(texts, starts, strict=True)]
            yielded += 1
        if yielded == new:
            return
        proposed = propose(texts, proposals)
        rows = [[text[-1], *more, *[0] * (proposals - len(more))] for text, more in zip(texts, proposed, strict=True)]
        # Missing draft tokens are 0. A finished sequence is run, too, and its result ignored. The next step overwrites
        # rejected tokens in the cache.
        positions = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        for text, start, more, argmax in zip(
            texts, starts, proposed, verify(torch.tensor(rows), positions).tolist(), strict=True
        ):
            if len(text) >= start + new:
                continue
            kept = 0
            while kept < len(more) and more[kept] == argmax[kept]:
                kept += 1
            # Cut to `new` tokens, so that a finished sequence's positions stay within the cache while others go on.
            text.extend(argmax[: min(kept + 1, start + new - len(text))])
