"""Reading option values that are lists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from semisparse.errors import InputError

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32")


def words(text: str | None) -> list[str] | None:
    """Cut ``a,b`` into words; None stays None."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def shape_names(text: str) -> list[str]:
    """Cut ``llama2-7b,4096,11008,dir`` into names and ``N,K`` pairs."""
    return [found.strip() for found in re.findall(r"\d+\s*,\s*\d+|[^,;]+", text) if found.strip()]


def numbers(text: str, option: str) -> list[int]:
    """Cut ``1,16,4096`` into positive numbers.

    Raises:
        InputError: a word is no positive whole number; names the option.
    """
    found = words(text) or []
    if not found or not all(word.isdecimal() and int(word) > 0 for word in found):
        raise InputError(f"{option} takes positive whole numbers by commas, got {text!r}")
    return [int(word) for word in found]


def dtype_named(name: str) -> torch.dtype:
    """Look a dtype up.

    Raises:
        InputError: it is none that weights may have.
    """
    if name not in DTYPES:
        raise InputError(f"--dtype takes {', '.join(DTYPES)}, got {name!r}")
    import torch

    return getattr(torch, name)
