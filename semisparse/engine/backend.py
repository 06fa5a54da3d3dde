"""Running a model token by token: the interface, and the engine's own decoder (on a GPU its step is a CUDA graph)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from semisparse.engine.bare import BareDecoder
from semisparse.engine.decoder import CHECKED_TOKENS, Cache, Decoder, check_against, free_memory
from semisparse.engine.draft_model import DraftModel
from semisparse.engine.ops import greedy_step, move_on
from semisparse.engine.prompts import SHORT_TOKENS, Prompts
from semisparse.engine.sampling import Sampling, choose
from semisparse.engine.speculation import Propose, Verifier, look_up_all, speculated
from semisparse.engine.state import State
from semisparse.errors import InputError
from semisparse.formats.kernel import bucket_of
from semisparse.runtime import cuda_libraries
from semisparse.runtime.capture import capture_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AHEAD = 8
"""Maximum decode steps in flight: launched, with tokens that the host has not read yet."""

CACHE_GRAIN = 256
"""A cache's length is rounded up to a multiple of this many positions, at most to the model's context. One captured
step serves all texts that fit the cache."""

FIXED_BATCH = {"cuda": 16, "cpu": 1}
"""Sequences per pass of a decode step with ``deterministic_batch``. On a GPU 16 tokens take 1.1 to 1.4 times as long as
one in most formats (3 to 6 times in one of them); the formats' README.md files have the times."""


class Backend(ABC):
    """Runs a model for batches of prompts.

    Attributes:
        context: maximum positions of the model.
        vocabulary: number of tokens in its vocabulary.
    """

    context: int
    vocabulary: int

    @abstractmethod
    def needs(self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int) -> Hashable:
        """Return a key that is equal for batches that need the same kernels and CUDA graphs."""

    @abstractmethod
    def compile(self, prompts: Sequence[Sequence[int]], new: int, proposals: int) -> None:
        """Compile what a batch needs, as far as that can be done in parallel."""

    @abstractmethod
    def run(
        self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int = 0
    ) -> Iterator[list[int]]:
        """Yield one token per prompt for each of ``new`` steps; the first step runs the prompts.

        Args:
            prompts: token ids of each prompt.
            new: tokens to generate per prompt.
            sampling: how they are chosen.
            proposals: tokens per sequence that are proposed and verified at once (greedy sampling only); 0 for none.
        """


class DecoderBackend(Backend):
    """The engine's own decoder.

    Args:
        model: on its device.
        draft: a smaller model that proposes tokens; if None, proposals are looked up in the text so far.
        deterministic_batch: whether a sequence's logits are the same bits in any batch.
        keep_dense: as in `Decoder.keep_dense`; without patterns no dense copies are kept.

    Attributes:
        dense_bytes: bytes of the dense copies.
    Raises:
        UnknownStructureError: the model is no Llama-like decoder.
        InputError: keep_dense matches no packed layer, or the copies do not fit the GPU's memory.
    """

    def __init__(
        self,
        model: PreTrainedModel | BareDecoder,
        draft: DecoderBackend | None = None,
        deterministic_batch: bool = False,
        keep_dense: Sequence[str] = (),
    ) -> None:
        self._draft = draft
        group = FIXED_BATCH[model.device.type] if deterministic_batch else None
        self.decoder = Decoder(model, CACHE_GRAIN, group)
        self.dense_bytes = self.decoder.keep_dense(model, keep_dense) if keep_dense else 0
        self.decoder.compile(1, [1], [CHECKED_TOKENS])
        check_against(model, self.decoder)
        self.context = self.decoder.structure.context
        self.vocabulary = int(self.decoder.structure.embedding.get_parameter("weight").shape[0])
        self._on_gpu = self.decoder.device.type == "cuda"
        self._state: State | None = None
        self._graphs: dict[Sampling, torch.cuda.CUDAGraph] = {}
        self._verifiers: dict[int, Verifier] = {}
        self.prompts = Prompts(self.decoder, captures=self._on_gpu and self.decoder.group is None)
        self._states = 0
        self._generator = torch.Generator(self.decoder.device)

    def needs(self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int) -> Hashable:
        count, lengths = len(prompts), [len(prompt) for prompt in prompts]
        cache = self._state_for(count, max(lengths) + new + proposals).cache
        padded = self.prompts.length(lengths, cache)
        if self.decoder.group is not None:
            buckets = frozenset(map(bucket_of, lengths))
        elif padded is not None and count * padded <= SHORT_TOKENS:  # its first use captures it
            buckets = frozenset([padded, bucket_of(count * padded)])
        else:
            longest = padded or max(lengths)
            buckets = frozenset(map(bucket_of, [longest, count * longest]))
        return self._states, count, buckets, sampling, proposals, new > 1

    def compile(self, prompts: Sequence[Sequence[int]], new: int, proposals: int) -> None:
        """Compile the kernels of all matmuls of a batch, in parallel, and wait for torch's libraries."""
        lengths = [len(prompt) for prompt in prompts]
        cache = self._state_for(len(prompts), max(lengths) + new + proposals).cache
        padded = self.prompts.length(lengths, cache)
        self.decoder.compile(
            cache.sequences, {1, 1 + proposals}, lengths if padded is None else [padded] * len(lengths)
        )
        self.prompts.expect(lengths, cache)
        if proposals and self._draft:
            self._draft.compile(prompts, new, proposals)
        cuda_libraries.wait()  # graphs are captured next

    @torch.no_grad()
    def run(
        self, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int = 0
    ) -> Iterator[list[int]]:
        """Yield one token per prompt for each of ``new`` steps.

        Raises:
            InputError: the cache does not fit the device's memory; the message says how many sequences would.
        """
        positions = max(map(len, prompts)) + new + proposals
        self._generator.manual_seed(sampling.seed)
        state = self._state_for(len(prompts), positions)
        copied = self._token_copies(state, new) if self._on_gpu and not proposals else None
        state, logits = self.begin(prompts, positions)
        self._choose(logits, state, sampling)
        if proposals:
            propose: Propose = look_up_all
            if self._draft:
                draft = DraftModel(self._draft)
                draft.begin(prompts, positions)
                propose = draft.propose
            first = state.tokens.tolist()[: len(prompts)]
            rows = speculated(self.verifier(proposals + 1), propose, prompts, first, new, proposals)
        elif copied is not None:
            rows = self._rows_on_gpu(state, new, sampling, *copied)
        else:
            rows = self._rows_on_cpu(state, new, sampling)
        for row in rows:
            yield row[: len(prompts)]

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], positions: int) -> tuple[State, Tensor]:
        """Run the prompts of a batch.

        Args:
            prompts: token ids of each prompt.
            positions: maximum positions per sequence, the prompt's included.
        Returns:
            The state, and the logits after each prompt, [sequences, vocabulary].
        """
        state = self._state_for(len(prompts), positions)
        unused = state.cache.sequences - len(prompts)
        # Before the prompts: this copy from host memory would wait for them, and what is launched next for the copy.
        last = [*(len(prompt) - 1 for prompt in prompts), *[0] * unused]
        state.positions.copy_(torch.tensor(last, dtype=torch.int32))
        state.steps.zero_()
        logits = self.prompts(prompts, state.cache)
        return state, functional.pad(logits, (0, 0, 0, unused)) if unused else logits

    def verifier(self, width: int) -> Verifier:
        """Return the decoder step for ``width`` tokens per sequence of the current batch."""
        if self._state is None:
            raise RuntimeError("no batch has begun")
        if width not in self._verifiers:
            self._verifiers[width] = Verifier(self.decoder, self._state, width)
        return self._verifiers[width]

    def _choose(self, logits: Tensor, state: State, sampling: Sampling) -> None:
        if sampling.greedy:
            greedy_step(logits, state.tokens, state.positions, state.output, state.steps)
        else:
            tokens = choose(logits, sampling, self._generator)
            move_on(tokens, state.tokens, state.positions, state.output, state.steps)

    def _step(self, state: State, sampling: Sampling) -> None:
        logits = self.decoder.step(state.tokens[:, None], state.positions, state.cache)
        self._choose(logits, state, sampling)

    def _rows_on_cpu(self, state: State, new: int, sampling: Sampling) -> Iterator[list[int]]:
        for step in range(new):
            if step:
                self._step(state, sampling)
            yield state.output[step].tolist()

    def _token_copies(self, state: State, new: int) -> tuple[torch.cuda.Stream, Tensor]:
        """Return a stream that copies tokens to the host, and pinned memory for them: made before the prompts run."""
        return torch.cuda.Stream(), torch.empty((new, state.cache.sequences), dtype=torch.int64, pin_memory=True)

    def _rows_on_gpu(
        self, state: State, new: int, sampling: Sampling, copies: torch.cuda.Stream, host_tokens: Tensor
    ) -> Iterator[list[int]]:
        """Launch decode steps before the host has read earlier tokens, and copy tokens on a second stream.

        Args:
            state: the batch, whose first tokens have been chosen.
            new: tokens per sequence, the first included.
            sampling: how they are chosen.
            copies: the second stream.
            host_tokens: [new, sequences] int64, pinned.
        """
        graph = self._graph(state, sampling) if new > 1 else None
        arrivals: deque[torch.cuda.Event] = deque()
        yielded = 0
        for step in range(new):
            if step and graph is not None:
                graph.replay()
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                host_tokens[step].copy_(state.output[step], non_blocking=True)
                arrivals.append(torch.cuda.Event())
                arrivals[-1].record()
            while arrivals and (len(arrivals) > AHEAD or arrivals[0].query()):
                arrivals.popleft().synchronize()
                yield host_tokens[yielded].tolist()
                yielded += 1
        while arrivals:
            arrivals.popleft().synchronize()
            yield host_tokens[yielded].tolist()
            yielded += 1

    def _graph(self, state: State, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Return the captured decode step. Before its capture it runs eagerly twice; then the state is restored."""
        if sampling not in self._graphs:
            kept = [part.clone() for part in (state.tokens, state.positions, state.output, state.steps)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step(state, sampling)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, stream=capture_stream()):
                self._step(state, sampling)
            for part, before in zip((state.tokens, state.positions, state.output, state.steps), kept, strict=True):
                part.copy_(before)
            self._generator.manual_seed(sampling.seed)
            self._graphs[sampling] = graph
        return self._graphs[sampling]

    def _state_for(self, count: int, positions: int) -> State:
        """Return a state for ``count`` sequences of ``positions`` positions: the current one if it fits."""
        sequences = 1 << (count - 1).bit_length() if self._on_gpu else count
        group = self.decoder.group or 1
        sequences = -(-sequences // group) * group
        length = min(-(-positions // CACHE_GRAIN) * CACHE_GRAIN, max(self.context, positions))
        state = self._state
        if state is not None and state.cache.sequences == sequences and state.cache.length >= positions:
            return state
        self._state, self._graphs, self._verifiers = None, {}, {}
        self.prompts.forget()
        self._states += 1
        self._check_memory(sequences, length)
        self.decoder.ensure_length(length)
        self._state = State.make(self.decoder, sequences, length)
        return self._state

    def _check_memory(self, sequences: int, length: int) -> None:
        if not self._on_gpu:
            return
        needed = Cache.bytes_of(self.decoder.structure, sequences, length, self.decoder.dtype)
        free = free_memory(self.decoder.device)
        if needed > free:
            fitting = sequences
            while fitting and needed * fitting > free * sequences:  # a batch is padded to a power of two
                fitting //= 2
            fitting -= fitting % (self.decoder.group or 1)
            of_them = "sequences" if fitting > 1 else "sequence"
            raise InputError(
                f"{sequences} sequences of {length} positions take {needed / 1e9:.1f} GB of cache, {free / 1e9:.1f} GB "
                f"of GPU memory are free: {fitting or 'not even one'} such {of_them} would fit"
            )
