"""The length of calibration and evaluation sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from semisparse.errors import InputError

Text = str | Path | Sequence[str]
"""A text file, or documents."""

DEFAULT_SEQLEN = 2048
"""Tokens per calibration or evaluation sequence, if the model's context is not shorter."""


def sequence_length(model: PreTrainedModel, seqlen: int | None) -> int:
    """Return the tokens per sequence: ``seqlen``, or by default the model's context, `DEFAULT_SEQLEN` at most.

    Raises:
        InputError: ``seqlen`` exceeds the model's context.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if seqlen is None:
        return min(context or DEFAULT_SEQLEN, DEFAULT_SEQLEN)
    if context is not None and seqlen > context:
        raise InputError(f"seqlen is {seqlen}, the model's context is {context}")
    return seqlen
