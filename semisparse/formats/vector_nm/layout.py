"""Which patterns fit, and how large the stored tensors are: groups of rows, windows of columns, slots of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from semisparse.formats.base import Params, TensorSpec
from semisparse.patterns import Pattern, VectorNM

MAX_WINDOW = 256
"""A vector's position in its window is one byte."""
MAX_LENGTH = 128
"""Rows of a vector: the last group is filled up to it, so longer ones would store more padding than weights."""

SPECS = (
    TensorSpec("values", None, ("groups", "slots", "length"), split_n=0, split_k=1),
    TensorSpec("positions", torch.uint8, ("groups", "slots"), split_n=0, split_k=1),
)

PLANNED = (
    *(replace(spec, split_n=None, split_k=None) for spec in SPECS),
    TensorSpec("starts", torch.int32, ("row_tiles+1",)),
    TensorSpec("columns", torch.int16, ("blocks", "block_columns")),
    TensorSpec("slots", torch.int16, ("blocks", "block_slots")),
    TensorSpec("records", torch.int32, ("blocks", "record")),
)
"""With a plan, on a GPU: see plan.py."""

TILE_ROWS = 256
"""Rows that have a plan together."""
BLOCK_COUNTS = {"block_columns": 32, "block_slots": 128, "record": 16}


def vectors_of(pattern: Pattern) -> VectorNM:
    """Give the pattern as the one family that the format stores."""
    if not isinstance(pattern, VectorNM):
        raise TypeError(f"format vector_nm stores no {pattern}")
    return pattern


def accepts(pattern: Pattern) -> str | None:
    """Say why the format cannot store ``pattern``, or None if it can."""
    if not isinstance(pattern, VectorNM):
        return "it stores keep:windowvlength: 16:32v32, 8:32v4, ... (16:32v1 for single weights)"
    if pattern.window > MAX_WINDOW:
        return f"a position in a window is one byte, so a window has at most {MAX_WINDOW} vectors, not {pattern.window}"
    if pattern.length > MAX_LENGTH:
        return f"a vector has at most {MAX_LENGTH} rows, not {pattern.length}"
    return None


def grain(pattern: Pattern, params: Params) -> tuple[int, int]:
    """Give the rows and columns that a part of the tensors may start at: whole groups and windows."""
    vectors = vectors_of(pattern)
    return vectors.length, vectors.window


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    return PLANNED if "blocks" in params else SPECS


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    vectors = vectors_of(pattern)
    # Zeros fill the last group, so the tensors alone do not tell N.
    if params["rows"] != n:
        raise ValueError(f"rows = {params['rows']!r}, expected N = {n}")
    windows = -(-k // vectors.window)
    found = {"groups": -(-n // vectors.length), "slots": windows * vectors.keep, "length": vectors.length}
    if "blocks" in params:
        found |= {"blocks": int(params["blocks"]), "row_tiles": -(-n // TILE_ROWS), **BLOCK_COUNTS}
    return found
