"""Several tokens at once: proposed by looking up what followed the last tokens before, verified in one step.

The result is the greedy one: a proposal is kept only where it is the token that the model takes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from semisparse.engine.decoder import Decoder
from semisparse.engine.state import State

NGRAMS = (3, 2, 1)
"""Last tokens that are looked for in the text before, the longest first."""


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to ``count`` tokens that followed the last tokens where these stood before, the latest place first."""
    for length in NGRAMS:
        last = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == last:
                return list(tokens[start + length : start + length + count])
    return []


class Verifier:
    """A step of several tokens per sequence, captured in a CUDA graph on a GPU.

    Args:
        decoder: the model.
        state: whose cache it extends.
        width: tokens of each sequence.
    """

    def __init__(self, decoder: Decoder, state: State, width: int) -> None:
        sequences, device = state.cache.sequences, decoder.device
        self._tokens = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._positions = torch.zeros(sequences, width, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(sequences, width, dtype=torch.int64, device=device)
        self._offsets = torch.arange(width, dtype=torch.int32)
        self._graph: torch.cuda.CUDAGraph | None = None

        def step() -> None:
            logits = decoder.step(self._tokens, self._positions.flatten(), state.cache)
            self._chosen.copy_(logits.argmax(-1).view_as(self._chosen))

        self._step = step

    def __call__(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Return the most probable token after each of the given ones.

        Args:
            tokens: [sequences, width] int64, in host memory.
            first: [sequences] int32, the place of each sequence's first.
        Returns:
            [sequences, width] int64, in host memory.
        """
        self._tokens.copy_(tokens)
        self._positions.copy_(first[:, None] + self._offsets)
        if self._tokens.device.type != "cuda":
            self._step()
        elif self._graph is None:
            self._step()  # compiles; the same positions are written again by the captured step
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            graph.replay()
            self._graph = graph
        else:
            self._graph.replay()
        return self._chosen.cpu()


def speculated(
    decoder: Decoder,
    state: State,
    prompts: Sequence[Sequence[int]],
    new: int,
    proposals: int,
    verifiers: dict[int, Verifier],
) -> Iterator[list[int]]:
    """Yield one token per sequence for each of ``new`` steps, as the greedy decode step would.

    Args:
        decoder: the model.
        state: after the prompts, with the first new token chosen.
        prompts: tokens.
        new: tokens of each sequence.
        proposals: tokens that are verified beside the last one.
        verifiers: by width; the one that is needed is added.
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
        # A sequence that is ahead waits at its last place, whose keys and values are written again.
        first = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        for text, start, more, chosen in zip(
            texts, starts, proposed, verify(torch.tensor(rows), first).tolist(), strict=True
        ):
            if len(text) >= start + new:
                continue
            kept = 0
            while kept < len(more) and more[kept] == chosen[kept]:
                kept += 1
            text.extend(chosen[: kept + 1])
