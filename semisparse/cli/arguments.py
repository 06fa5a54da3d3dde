"""Options that several verbs share, and the parsing of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from semisparse.errors import InputError

if TYPE_CHECKING:
    import torch

MAX_DIGITS = 18
"""Digits of a number below 2^63."""

DTYPES = ("float16", "bfloat16", "float32")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Shapes = Annotated[
    str,
    typer.Option(
        "--shapes", help="Architectures (with :fused for fused layers), model directories or N,K, comma-separated."
    ),
]
TokenCounts = Annotated[str, typer.Option("--tokens", help="Numbers of tokens M, comma-separated.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"Dtype of weights and activations: {', '.join(DTYPES)}.")]
Formats = Annotated[str | None, typer.Option("--formats", help="Formats, comma-separated; all by default.")]
Patterns = Annotated[
    str | None, typer.Option("--patterns", help="Patterns, comma-separated; those of the recipes by default.")
]


def writable_file(path: Path | None) -> Path | None:
    """Return the path of a file to write, or refuse it before the work whose result it takes.

    Raises:
        InputError: it is a directory, or nothing can be written to its folder.
    """
    if path is None:
        return None
    try:
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a directory; name a file")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        with TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name a file elsewhere") from error


OutCsv = Annotated[Path | None, typer.Option("--out", callback=writable_file, help="The CSV file to write.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Sequences per batch.")]
PromptTokens = Annotated[int, typer.Option("--prompt", min=1, help="Tokens per prompt.")]
NewTokens = Annotated[int, typer.Option("--new", min=1, help="Tokens to generate per sequence.")]


def comma_separated(text: str | None) -> list[str] | None:
    """Split ``a,b`` into words; None stays None."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def shape_names(text: str) -> list[str]:
    """Split ``llama2-7b,4096,11008,dir`` into names and ``N,K`` pairs.

    Raises:
        InputError: there is none.
    """
    names = [name.strip() for name in re.findall(r"\d+\s*,\s*\d+|[^,;]+", text) if name.strip()]
    if not names:
        raise InputError(f"--shapes takes architectures, model directories or N,K, comma-separated, got {text[:99]!r}")
    return names


def positive_integers(text: str, option: str) -> list[int]:
    """Split ``1,16,4096`` into positive integers.

    Args:
        text: the option's value.
        option: the option's name, for the error message.
    Raises:
        InputError: a word is no positive integer.
    """
    words = comma_separated(text) or []
    if not words or not all(word.isdecimal() and len(word) <= MAX_DIGITS and int(word) > 0 for word in words):
        raise InputError(
            f"{option} takes positive whole numbers below 10^{MAX_DIGITS}, comma-separated, got {text[:99]!r}"
        )
    return [int(word) for word in words]


def key_values(settings: Sequence[str], option: str) -> dict[str, str | int]:
    """Split settings ``key=value`` into a dictionary; a value of digits alone becomes an integer.

    Args:
        settings: the option's values.
        option: the option's name, for the error message.
    Raises:
        InputError: a setting is not written key=value.
    """
    pairs = [setting.partition("=") for setting in settings]
    for key, equals, value in pairs:
        if not key or not equals or not value:
            raise InputError(f"{option} takes key=value, got {(key + equals + value)[:99]!r}")
    return {key: int(value) if value.isdecimal() and len(value) <= MAX_DIGITS else value for key, _, value in pairs}


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype ``name``.

    Raises:
        InputError: it is not one of `DTYPES`.
    """
    if name not in DTYPES:
        raise InputError(f"--dtype takes {', '.join(DTYPES)}, got {name!r}")
    import torch

    return getattr(torch, name)
