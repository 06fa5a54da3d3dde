"""The engine: continues prompts with a model, given as a directory or in memory."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from semisparse.engine.backend import Backend, DecoderBackend
from semisparse.engine.generation import Continuation, Generation, OnText
from semisparse.engine.prompt_tokens import chat_prompt, decode, end_tokens, tokenize_all
from semisparse.engine.recorded import load_recorded, record_decoder
from semisparse.engine.sampling import Sampling
from semisparse.engine.structure import UnknownStructureError
from semisparse.engine.text import TextStream
from semisparse.errors import InputError, SemisparseError
from semisparse.nn import join_layers
from semisparse.nn.dense_linear import slower_layers
from semisparse.runtime.modes import thread_defaults

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST_RUN = 2048
"""Tokens of the longest prompt that `Engine.warm` runs on a CPU: each takes time, and all compile the same code."""

MAX_PROPOSALS = 31
"""Maximum draft tokens per sequence and decode step."""


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Replace torch's out-of-memory error by a SemisparseError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise SemisparseError(
            f"the GPU's memory is full: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; "
            "take a smaller batch or a shorter prompt, or end other processes that use it"
        ) from error


def _on_device(model: str | Path | PreTrainedModel, device: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the model, loaded if it is a directory; on a GPU layers that share an input are joined."""
    if isinstance(model, str | Path):
        from semisparse.checkpoint import load_model  # imports transformers

        return load_model(model, device, dtype, join=join_layers)
    if model.device.type == "cuda":
        join_layers(model)
    return model


def _tokenizer_of(path: str | Path) -> PreTrainedTokenizerBase:
    from semisparse.checkpoint import load_tokenizer  # imports transformers

    return load_tokenizer(path)


class Engine:
    """A model that continues prompts.

    Args:
        model: a model directory, dense or compressed, or a model on its device.
        tokenizer: the model's; read from the directory if None.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``: where a directory is loaded.
        dtype: dtype of tensors that are not packed; by default the checkpoint's, but float32 on a CPU, where half
            precision is slow.
        draft: a smaller model with the same tokenizer, which proposes tokens in `generate`; if None, proposals are
            looked up in the text.
        deterministic_batch: whether a prompt's logits are the same bits whatever other prompts are in its batch.
            Prompts are then run one by one, and decode steps in groups of a fixed size.
        bare: whether a directory may be loaded without transformers, whose import takes 2 to 3 seconds, if an earlier
            start recorded how. The first start records it, once it has compared the logits.
        keep_dense: glob patterns of module names, such as ``*.down_proj`` or ``*``. Packed layers that match get a
            dense copy beside them, which computes the numbers of tokens at which it is faster: prompts, as a rule.
            The weights must not change afterwards. A copy does not quantise x, as a ``w4a8`` layer does. Layers on one
            input (q, k and v; gate and up) are copied together, if all match.

    Attributes:
        dense_bytes: bytes of these copies.
        note: why the model runs through transformers' own code, or None.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: the draft model has another vocabulary; keep_dense matches no packed layer, or its copies do not fit
            the GPU's memory; or the engine's own code, which a draft model, deterministic_batch and keep_dense need,
            cannot run one of the models.
        SemisparseError: the models do not fit the GPU's memory.
    """

    @thread_defaults()
    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        draft: str | Path | PreTrainedModel | None = None,
        deterministic_batch: bool = False,
        keep_dense: Sequence[str] = (),
        bare: bool = False,
    ) -> None:
        if isinstance(keep_dense, str):
            raise InputError(f"keep_dense is the text {keep_dense[:99]!r}, expected a list of patterns")
        start = time.perf_counter()
        bare = bare and isinstance(model, str | Path) and tokenizer is None and draft is None
        self.model: Any
        self.tokenizer: Any
        with _memory_errors():
            recorded = load_recorded(Path(str(model)), device, dtype) if bare else None
            if isinstance(model, str | Path) and recorded is None:
                tokenizer = tokenizer or _tokenizer_of(model)
            self.model, self.tokenizer = recorded or (_on_device(model, device, dtype), tokenizer)
            if isinstance(draft, str | Path):
                self._check_tokenizer(draft)
            draft_model = None if draft is None else _on_device(draft, str(self.model.device), dtype)
        self.load_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.note: str | None = None
        with _memory_errors():
            self.backend = self._backend(self.model, draft_model, deterministic_batch, keep_dense)
        if bare and recorded is None and isinstance(self.backend, DecoderBackend):
            record_decoder(
                Path(str(model)), dtype, self.model, self.backend.decoder, self.tokenizer, end_tokens(self.model)
            )
        self.dense_bytes = getattr(self.backend, "dense_bytes", 0)
        self._warm: set[Hashable] = set()
        self._lock, self._thread = threading.Lock(), 0
        self._check_seconds = time.perf_counter() - start
        self._copied = tuple(keep_dense)

    def slower_than_dense(self, m: int) -> list[str]:
        """Return the names of the packed layers that are slower than dense with ``m`` tokens, by the device's tables.

        Layers of ``keep_dense`` are left out; so is what the tables (`semisparse bench tune`) do not have.
        """
        return slower_layers(self.model, m, self.model.dtype, self._copied)

    def _backend(
        self,
        model: PreTrainedModel,
        draft_model: PreTrainedModel | None,
        deterministic_batch: bool,
        keep_dense: Sequence[str],
    ) -> Backend:
        try:
            draft = None if draft_model is None else DecoderBackend(draft_model)
            backend = DecoderBackend(model, draft, deterministic_batch, keep_dense)
        except UnknownStructureError as error:
            if draft_model is not None:
                raise InputError(f"a draft model needs the engine's own code for both models: {error}") from error
            if deterministic_batch or keep_dense:
                needing = "deterministic_batch" if deterministic_batch else "keep_dense"
                raise InputError(f"{needing} needs the engine's own code: {error}") from error
            self.note = f"{type(model).__name__} runs through transformers' own code: {error}"
            warnings.warn(self.note, stacklevel=3)
            # Imports transformers' model classes.
            from semisparse.engine.transformers_backend import TransformersBackend

            return TransformersBackend(model)
        if draft and draft.vocabulary != backend.vocabulary:
            raise InputError(
                f"the draft model knows {draft.vocabulary} tokens, the model {backend.vocabulary}: "
                "take one with the same tokenizer"
            )
        return backend

    def _check_tokenizer(self, draft: str | Path) -> None:
        own, other = self.tokenizer, _tokenizer_of(draft)
        if own is not None and own.get_vocab() != other.get_vocab():
            raise InputError(
                f"the tokenizer of the draft model {draft} has other tokens: take one with the same tokenizer"
            )

    def prepare(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        *,
        sampling: Sampling | None = None,
        proposals: int = 0,
        **others: Any,
    ) -> float:
        """Compile and capture what a batch needs, and check that it can be run; return the seconds that it took.

        The arguments are those of `generate`; ``others`` are ignored.
        """
        sampling = sampling or Sampling()
        tokenized = self._tokens(prompts)
        self._check_room(tokenized, max_new_tokens)
        with self._alone():
            return self._compile(tokenized, max_new_tokens, sampling, proposals)

    def warm(self, batches: Sequence[int] = (1,)) -> float:
        """Compile and capture what batches of these sizes need for short and long prompts; return the seconds it took.

        Kernels are compiled in parallel, in a thread per CPU core.
        """
        start = time.perf_counter()
        with self._alone():
            long = self.backend.context // 2
            if self.model.device.type == "cpu" or self.note is not None:
                long = min(long, LONGEST_RUN)
            for count in batches:
                for length in (1, max(1, long)):
                    prompts = [[0] * length] * count
                    self._compile(prompts, min(2, self.backend.context - length), Sampling(), 0)
        return time.perf_counter() - start

    def echo(self, prompt: str) -> str:
        """Return the text with which `Generation.text` begins for a prompt: the prompt without special tokens."""
        return self._decoded(self._tokens([prompt])[0])

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """Return a conversation as a prompt, by the tokenizer's chat template.

        Raises:
            InputError: the tokenizer has no chat template, or it refuses the conversation.
        """
        return chat_prompt(self.tokenizer, messages)

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        proposals: int = 0,
        on_text: OnText | None = None,
        special_tokens: bool = True,
    ) -> list[Generation]:
        """Continue prompts, all at once. Calls of several threads run one after another.

        Args:
            prompts: texts.
            max_new_tokens: maximum new tokens per prompt.
            sampling: how tokens are chosen; greedily if None.
            stop: strings that end a continuation, and are left out.
            proposals: tokens that the draft model, or look-up in the text so far, proposes per step; they are verified
                at once and do not change the greedy text. 0 for none.
            on_text: called with each new piece of text.
            special_tokens: whether the tokenizer adds special tokens, such as BOS, to prompts.
        Raises:
            InputError: there is no prompt; one is no text, empty or longer than the model's context; or the batch does
                not fit the memory.
            SemisparseError: the GPU's memory is full, for instance because another process fills it meanwhile.
        """
        if isinstance(stop, str):
            raise InputError(f"stop is the text {stop[:99]!r}, expected a list of texts")
        sampling = sampling or Sampling()
        tokenized = self._tokens(prompts, special_tokens)
        self._check_room(tokenized, max_new_tokens)
        with self._alone():
            return self._run(tokenized, max_new_tokens, sampling, stop, proposals, on_text)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other threads' batches, all of which share the cache, and make the model's GPU the current one.

        The caller's modes, such as autocast, do not hold inside.

        Raises:
            InputError: ``on_text`` called the engine that calls it.
        """
        if self._thread == threading.get_ident():
            raise InputError("on_text called its own engine; collect the text, and call the engine afterwards")
        with self._lock, torch.cuda.device_of(next(self.model.parameters())), thread_defaults():
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def _run(
        self,
        tokenized: Sequence[list[int]],
        new: int,
        sampling: Sampling,
        stop: Sequence[str],
        proposals: int,
        on_text: OnText | None,
    ) -> list[Generation]:
        """Compile and run a batch, as `generate` does."""
        compile_seconds = self._compile(tokenized, new, sampling, proposals)
        ends = end_tokens(self.model)
        continuations = [
            Continuation(TextStream(self._decoded, tokens, stop), ends, on_text and partial(on_text, number))
            for number, tokens in enumerate(tokenized)
        ]
        start = time.perf_counter()
        first = 0.0
        with _memory_errors():
            for row in self.backend.run(tokenized, new, sampling, proposals):
                first = first or time.perf_counter() - start
                for continuation, token in zip(continuations, row, strict=True):
                    continuation.add(token)
                if all(continuation.done for continuation in continuations):
                    break
        seconds = time.perf_counter() - start
        return [
            Generation(
                text=self._decoded(tokens) + continuation.finish(),
                new_tokens=continuation.new_tokens,
                seconds=seconds,
                first_token_seconds=first,
                decode_seconds=seconds - first,
                load_seconds=self.load_seconds,
                compile_seconds=compile_seconds,
            )
            for tokens, continuation in zip(tokenized, continuations, strict=True)
        ]

    def _tokens(self, prompts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        return tokenize_all(self.tokenizer, prompts, self.backend.vocabulary, special_tokens)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return decode(self.tokenizer, tokens)

    def _check_room(self, tokenized: Sequence[Sequence[int]], new: int) -> None:
        """Check that the model's context has room for so many new tokens per prompt.

        Raises:
            InputError: it has not, or ``new`` is below 1.
        """
        if new < 1:
            raise InputError(f"max-new-tokens is {new}; ask for at least 1")
        longest = max(map(len, tokenized))
        if longest + new > self.backend.context:
            raise InputError(
                f"{longest} prompt tokens and {new} new ones exceed the model's context of {self.backend.context}"
            )

    def _compile(self, tokenized: Sequence[Sequence[int]], new: int, sampling: Sampling, proposals: int) -> float:
        """Compile a batch's kernels and run up to two of its steps, unless done before; return the seconds it took."""
        if proposals and not sampling.greedy:
            raise InputError("proposed tokens are verified against the greedy choice: leave the temperature at 0")
        if not 0 <= proposals <= MAX_PROPOSALS:
            raise InputError(f"proposals is {proposals}; it is 0 to {MAX_PROPOSALS}")
        with _memory_errors():  # allocates the cache
            key = self.backend.needs(tokenized, new, sampling, proposals)
        if key in self._warm:
            return 0.0
        start = time.perf_counter()
        with _memory_errors():
            self.backend.compile(tokenized, new, proposals)
            # Run to the end, for exactly these steps. An abandoned run leaves up to AHEAD steps on the GPU, and the
            # next batch's first token would wait for them.
            for _ in self.backend.run(tokenized, min(new, 2), sampling, proposals):
                pass
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # the last step's token is here before its kernels have ended
        self._warm.add(key)
        seconds, self._check_seconds = time.perf_counter() - start + self._check_seconds, 0.0
        return seconds
