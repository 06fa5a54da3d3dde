"""Calibration batches: token ids drawn from text."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from semisparse.compress.decoder import decoder_layers, linear_layers
from semisparse.errors import InputError
from semisparse.nn import weight_of
from semisparse.text import token_chunks

BATCH_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Maximum tokens per batch by device type, unless one sequence is longer. Batches are larger on a GPU, because there
every batch splits each float32 weight into two of bfloat16 (three_pass.py)."""

CALIBRATION_TOKENS = 128 * 2048
"""Maximum of the default number of calibration tokens: 128 sequences of 2,048, the usual number."""

TOKENS_PER_INPUT = 256
"""Default calibration tokens per input feature of the widest linear layer. A layer's error on held-out tokens exceeds
that on the calibration tokens in proportion to features / tokens, so narrow layers need fewer tokens
(docs/decisions/calibration-size.md)."""

NEEDS_CALIBRATION = (
    "compression needs calibration text: pruning, search and tuning measure errors on it "
    "(not needed if prune=none; nor if prune=magnitude, search=none and tune=none)"
)


def calibration_tokens(model: nn.Module) -> int:
    """Return the default number of calibration tokens of a model, from the input features of its widest linear layer.

    It is `TOKENS_PER_INPUT` per feature, `CALIBRATION_TOKENS` at most.
    """
    _, layers = decoder_layers(model)
    widths = [weight_of(linear).shape[1] for layer in layers for linear in linear_layers(layer).values()]
    return min(CALIBRATION_TOKENS, TOKENS_PER_INPUT * max(widths)) if widths else CALIBRATION_TOKENS


def calibration_batches(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | Sequence[str],
    *,
    samples: int | None,
    seqlen: int,
    seed: int,
    tokens: int = CALIBRATION_TOKENS,
    device: str = "cpu",
) -> list[Tensor]:
    """Draw calibration sequences from text and batch those of equal length, the longest first.

    Args:
        tokenizer: of the model.
        text: a file or documents, cut by `token_chunks`.
        samples: sequences to draw; all if the text holds fewer. None: as many as hold ``tokens``.
        seqlen: maximum tokens per sequence.
        seed: of the random draw.
        tokens: to draw if ``samples`` is None, such as `calibration_tokens`.
        device: type of the device that the batches run on, ``cpu`` or ``cuda``.
    Returns:
        Token ids, [batch, tokens] int64 per batch.

    Raises:
        InputError: ``samples`` is below 1, or `token_chunks` cannot read the text or cut a sequence from it.
    """
    if samples is not None and samples < 1:
        raise InputError(f"calibration needs at least 1 sample, got {samples}")
    chunks = token_chunks(tokenizer, text, seqlen)
    drawn = random.Random(seed).sample(chunks, min(samples or len(chunks), len(chunks)))
    sequences = drawn if samples else drawn[: _default_samples(drawn, tokens)]
    return _batches(sequences, BATCH_TOKENS[device])


def warn_if_fewer(batches: Sequence[Tensor], samples: int | None) -> None:
    """Warn if the text held fewer sequences than the ``samples`` that were asked for."""
    drawn = sum(len(batch) for batch in batches)
    if samples is not None and drawn < samples:
        tokens = sum(batch.numel() for batch in batches)
        warnings.warn(
            f"{samples} calibration samples were asked for, and the text holds {drawn} ({tokens} tokens): all are used",
            stacklevel=3,
        )


def check_batches(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Raise unless the model can run the batches.

    Raises:
        InputError: there are no batches, one is longer than the model's context, or a token is not in its vocabulary.
    """
    if not batches:
        raise InputError(NEEDS_CALIBRATION)
    longest = max(batch.shape[1] for batch in batches)
    config: Any = model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest > context:
        raise InputError(f"calibration samples of {longest} tokens exceed the model's context of {context}")
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    largest = max(int(batch.max()) for batch in batches)
    if largest >= vocabulary:
        raise InputError(f"token {largest} is not in the model's vocabulary of {vocabulary}; is this its tokenizer?")


def _default_samples(chunks: Sequence[list[int]], tokens: int) -> int:
    """Return how many of the first chunks hold ``tokens`` tokens; all of them if they hold fewer."""
    ends = itertools.accumulate(map(len, chunks))
    return next((count for count, end in enumerate(ends, 1) if end >= tokens), len(chunks))


def _batches(chunks: Iterable[list[int]], tokens: int) -> list[Tensor]:
    """Batch chunks of equal length, the longest first: at most ``tokens`` tokens per batch, and at least one chunk."""
    by_length: dict[int, list[list[int]]] = {}
    for chunk in chunks:
        by_length.setdefault(len(chunk), []).append(chunk)
    batches = []
    for length, alike in sorted(by_length.items(), reverse=True):
        size = max(1, tokens // length)
        batches += [torch.tensor(alike[start : start + size]) for start in range(0, len(alike), size)]
    return batches
