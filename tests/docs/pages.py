"""The commands and programs on the pages in docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"


class Block(NamedTuple):
    kind: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, by its path from docs/."""
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE):
        yield Block(kind, text)


def file_of(block: Block) -> str | None:
    """Return the file name in a block's first line; None if the block is no file."""
    match = re.match(r"# (\S+\.\w+)\n", block.text)
    return match[1] if match else None


def lines(page: str) -> list[str]:
    """Return the commands of a page, in order, as a shell reads them."""
    texts = [block.text.replace("\\\n", " ") for block in blocks(page) if block.kind == "console"]
    return [line.removeprefix("$ ") for text in texts for line in text.splitlines() if line.startswith("$ ")]


def commands(page: str) -> list[list[str]]:
    """Return the commands of a page, in order, as lists of words without comments."""
    return [shlex.split(line, comments=True) for line in lines(page)]
