"""The length of the sequences that a model is calibrated and measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from semisparse.errors import InputError

Text = str | Path | Sequence[str]
"""A file, or documents."""

DEFAULT_SEQLEN = 2048
"""Tokens in a calibration or evaluation sequence, where the model's context is not shorter."""


def sequence_length(model: PreTrainedModel, seqlen: int | None) -> int:
    """Give the tokens in a sequence: as asked for, or else the model's context, `DEFAULT_SEQLEN` at most.

    Raises:
        InputError: the context is shorter.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if seqlen is None:
        return min(context or DEFAULT_SEQLEN, DEFAULT_SEQLEN)
    if context is not None and seqlen > context:
        raise InputError(f"seqlen is {seqlen}, the model's context is {context}")
    return seqlen
