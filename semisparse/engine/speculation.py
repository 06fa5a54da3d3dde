"""Speculative decoding with draft tokens looked up in the text so far (prompt lookup), verified in one decoder step.

Draft tokens are accepted up to the first that differs from the model's argmax: the output is that of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from semisparse.engine.decoder import Decoder
from semisparse.engine.state import State

NGRAMS = (3, 2, 1)
"""Lengths of the n-grams at the text's end that are looked up, the longest first."""


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to ``count`` draft tokens: those after the latest earlier occurrence of the longest n-gram of `NGRAMS`.

    None if no n-gram at the end of ``tokens`` occurs before.
    """
    for length in NGRAMS:
        last = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == last:
                return list(tokens[start + length : start + length + count])
    return []


class Verifier:
    """Runs a decoder step of several tokens per sequence. On a GPU the step is a CUDA graph.

    Args:
        decoder: the model.
        state: the decode state; the step writes to its KV cache.
        width: tokens per sequence and step.
    """

    def __init__(self, decoder: Decoder, state: State, width: int) -> None:
        sequences, device = state.cache.sequences, decoder.device
        self._tokens = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._positions = torch.zeros(sequences, width, dtype=torch.int32, device=device)
        self._argmax = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._offsets = torch.arange(width, dtype=torch.int32)
        self._graph: torch.cuda.CUDAGraph | None = None

        def step() -> None:
            logits = decoder.step(self._tokens, self._positions.flatten(), state.cache)
            self._argmax.copy_(logits.argmax(-1).view_as(self._argmax))

        self._step = step

    def __call__(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Return the argmax token after each input token.

        Args:
            tokens: [sequences, width] int64, in host memory.
            first: [sequences] int32, the position of each sequence's first input token.
        Returns:
            [sequences, width] int64, in host memory.
        """
        self._tokens.copy_(tokens)
        self._positions.copy_(first[:, None] + self._offsets)
        if self._tokens.device.type != "cuda":
            self._step()
        elif self._graph is None:
            self._step()  # compiles the kernels; the replay below overwrites the same positions of the cache
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            graph.replay()
            self._graph = graph
        else:
            self._graph.replay()
        return self._argmax.cpu()


def speculated(
    decoder: Decoder,
    state: State,
    prompts: Sequence[Sequence[int]],
    new: int,
    proposals: int,
    verifiers: dict[int, Verifier],
) -> Iterator[list[int]]:
    """Yield ``new`` lists, each with the next token of every sequence: those of greedy decoding.

    Args:
        decoder: the model.
        state: the decode state after the prompts; `State.tokens` holds the first new token of each sequence.
        prompts: token ids of each sequence's prompt.
        new: tokens to generate per sequence, the one in `State.tokens` included.
        proposals: draft tokens per sequence and step, at most.
        verifiers: cache of `Verifier` by width, for this decoder and state; a missing one is added.
    """
    width = proposals + 1
    verify = verifiers.setdefault(width, Verifier(decoder, state, width))
    texts = [[*prompt, token] for prompt, token in zip(prompts, state.tokens.tolist(), strict=True)]
    starts = [len(prompt) for prompt in prompts]
    yielded = 0
    while yielded < new:
        while yielded < new and all(len(text) > start + yielded for text, start in zip(texts, starts, strict=True)):
            yield [text[start + yielded] for text, start in zip(texts, starts, strict=True)]
            yielded += 1
        if yielded == new:
            return
        proposed = [propose(text, proposals) for text in texts]
        rows = [[text[-1], *more, *[0] * (proposals - len(more))] for text, more in zip(texts, proposed, strict=True)]
        # Missing draft tokens are 0. A finished sequence takes part too, and its result is ignored. What the cache
        # holds of rejected tokens is overwritten by the next step.
        first = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        for text, start, more, argmax in zip(
            texts, starts, proposed, verify(torch.tensor(rows), first).tolist(), strict=True
        ):
            if len(text) >= start + new:
                continue
            kept = 0
            while kept < len(more) and more[kept] == argmax[kept]:
                kept += 1
            text.extend(argmax[: kept + 1])
