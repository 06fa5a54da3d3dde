"""Prompts as CUDA graphs: where launching them takes the host longer than the GPU needs to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semisparse.engine.decoder import Cache, Decoder, free_memory
from semisparse.engine.projection import rows_of
from semisparse.formats.kernel import bucket_of
from semisparse.runtime.capture import capture_stream

SHORT_TOKENS = 512
"""Most tokens, padding included, of a batch that is padded to the next bucket and captured at its first use. Eight
blocks of llama2-7b take 2.9 ms for 512 tokens if captured, and 3.6 ms launched from Python (H200,
results/h200/blocks.csv)."""

MAX_TOKENS = 2048
"""Most tokens, padding included, of a batch that is captured. Launching 16 decoder layers takes the host 6 (dense) to
15 ms (int8), which the GPU needs for 1,500 to 4,000 tokens of a 1B model. 1,024 tokens take 4.1 instead of 6.2 ms if
captured (dense) and 4.5 instead of 15.1 (int8), 4,096 only 3 to 20 % less (H200, results/h200/captured-prompts.csv)."""

GRAIN = 128
"""A batch of more than `SHORT_TOKENS` is padded to a multiple of about so many tokens; tiles of GEMMs have 128 or more.
Where the GPU decides, it costs up to 7 % (1,025 tokens), most often 1 % (H200,
results/h200/sweeps/captured-prompts-padding.csv)."""

MAX_GRAPHS = 64
"""Most graphs that are kept; the one that was used longest ago is dropped."""


def captured_length(lengths: Sequence[int], cache: Cache) -> int | None:
    """Return the length that a batch of prompts is padded to, or None if the batch is neither padded nor captured.

    Args:
        lengths: tokens of each prompt.
        cache: the cache that the prompts are written to; padding takes positions in it, too.
    """
    count, longest = len(lengths), max(lengths)
    padded = bucket_of(longest)
    if count * padded > SHORT_TOKENS:
        grain = max(1, GRAIN // count)
        padded = -(-longest // grain) * grain
    return padded if count * padded <= MAX_TOKENS and padded <= cache.length else None


class Prompts:
    """Runs prompts; on a GPU as CUDA graphs, one per number and padded length of prompts.

    A batch of up to `SHORT_TOKENS` tokens is captured at its first use. A longer one is launched from Python at its
    first use and captured at its second, so that a length that does not come again costs nothing more. It is padded
    alike at both: its logits are the same bits.

    Args:
        decoder: runs the prompts.
        captures: whether they may be captured: on a GPU, and without `Decoder.group`.

    Attributes:
        captures: likewise; if False, prompts are not padded either.
    """

    def __init__(self, decoder: Decoder, captures: bool) -> None:
        self._decoder, self.captures = decoder, captures
        self._used: set[tuple[int, int]] = set()
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, because the cache that they write to is dropped."""
        self._graphs: dict[tuple[int, int], CapturedPrompts] = {}
        self._pool: Any = None
        self._logits: Tensor | None = None

    def length(self, lengths: Sequence[int], cache: Cache) -> int | None:
        """Return `captured_length`, or None if nothing is captured."""
        return captured_length(lengths, cache) if self.captures else None

    def expect(self, lengths: Sequence[int], cache: Cache) -> None:
        """Count a batch as used before, so that its next use captures it."""
        length = self.length(lengths, cache)
        if length is not None:
            self._used.add((len(lengths), length))

    def __call__(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Run prompts, which begin at position 0.

        Args:
            prompts: token ids of each prompt.
            cache: of as many sequences or more, the same until `forget` is called.
        Returns:
            [prompts, vocabulary], the logits after each prompt.
        """
        own = cache.part(0, len(prompts))
        length = self.length([len(prompt) for prompt in prompts], cache)
        if length is None:
            return self._decoder.prompt(prompts, own)
        key = len(prompts), length
        if key not in self._graphs:
            tokens, is_first = len(prompts) * length, key not in self._used
            self._used.add(key)
            # A graph keeps its memory. As much must be left for batches that are launched from Python.
            if (is_first and tokens > SHORT_TOKENS) or 2 * self._bytes(tokens) > free_memory(self._decoder.device):
                return self._decoder.prompt(prompts, own, length)
            if len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._make(own, length, cache.sequences)
        graph = self._graphs[key] = self._graphs.pop(key)  # the last in order
        return graph(prompts)

    def _make(self, own: Cache, length: int, sequences: int) -> CapturedPrompts:
        device, dtype = self._decoder.device, self._decoder.dtype
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        if self._logits is None:
            vocabulary = rows_of(self._decoder.structure.head)
            self._logits = torch.empty(sequences, vocabulary, dtype=dtype, device=device)
        return CapturedPrompts(self._decoder, own, length, self._logits[: own.sequences], self._pool)

    def _bytes(self, tokens: int) -> int:
        """Estimate the bytes that a graph holds: the activations of a decoder layer."""
        structure = self._decoder.structure
        hidden, inner = len(structure.norm), rows_of(structure.layers[0].gate)
        return 4 * tokens * (hidden + inner) * self._decoder.dtype.itemsize


class CapturedPrompts:
    """The pass over prompts of one length. Its first call runs it and captures it in a CUDA graph.

    Args:
        decoder: runs the prompts; its kernels for so many tokens are loaded.
        cache: of as many sequences as there are prompts.
        length: tokens per prompt, shorter prompts are padded.
        logits: [prompts, vocabulary], to which the graph writes; all graphs of a decoder may share it.
        pool: what `torch.cuda.graph_pool_handle` returns: memory that the graphs of a decoder share.
    """

    def __init__(self, decoder: Decoder, cache: Cache, length: int, logits: Tensor, pool: Any) -> None:
        self._decoder, self._cache, self._logits, self._pool = decoder, cache, logits, pool
        self._tokens = torch.zeros(cache.sequences, length, dtype=torch.int64, device=decoder.device)
        self._last = torch.zeros(cache.sequences, dtype=torch.int64, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None

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
        if self._graph is None:
            logits = self._run()  # loads what has not been loaded yet
            self._graph = self._captured()
            return logits
        self._graph.replay()
        return self._logits.clone()  # other graphs write to it, too

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, capture_stream(), "thread_local"):  # other threads may allocate
            self._logits.copy_(self._run())
        return graph

    def _run(self) -> Tensor:
        return self._decoder.padded_prompt(self._tokens, self._last, self._cache)
