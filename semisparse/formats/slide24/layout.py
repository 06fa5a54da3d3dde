"""How long a row becomes: groups of ``window`` columns, each lifted to ``window / 2 - 1`` windows of 4."""

from __future__ import annotations

from math import gcd

ALIGN = 32
"""Lifted columns come in multiples of it: cuSPARSELt takes no others in 8 bits, and bytes of metadata are whole."""

TOKEN_BYTES = 128
"""Of a token in a tile of lifted activations: what Hopper's shared memory swizzles as one row."""


def aligned_groups(window: int) -> int:
    """Count the fewest groups whose lifted columns are a multiple of `ALIGN`."""
    return ALIGN // gcd(ALIGN, 2 * (window - 2))


def padded_groups(k: int, window: int) -> int:
    """Count the groups of a row of K columns, zeros filled up until the lifted columns are a multiple of `ALIGN`."""
    together = aligned_groups(window)
    return -(-k // (window * together)) * together


def lifted_columns(k: int, window: int) -> int:
    """Give K', the length of a lifted row; half as many values are stored."""
    return padded_groups(k, window) * 2 * (window - 2)
