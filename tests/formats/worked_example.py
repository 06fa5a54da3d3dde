"""The worked example of a format's README: the bytes of a small packed weight."""

from __future__ import annotations

import re
from pathlib import Path

import semisparse.formats

FORMATS = Path(semisparse.formats.__file__).parent
LINE = re.compile(r"([a-z_]{3,}|)\s*(.*)")
"""The tensor's name, or nothing if the line continues the one before; then bytes."""


def worked_example(form: str, title: str = "") -> dict[str, bytes]:
    """Return the bytes of each tensor in the block ``bytes TITLE`` of a format's README."""
    fence = re.escape(f"```bytes {title}".rstrip())
    block = re.search(rf"{fence}\n(.*?)```", (FORMATS / form / "README.md").read_text(), re.DOTALL)
    assert block, f"the README of {form} has no block of bytes {title}"
    found: dict[str, str] = {}
    name = ""
    for line in block[1].splitlines():
        begins, digits = LINE.fullmatch(line).groups()
        name = begins or name
        found[name] = found.get(name, "") + digits
    return {name: bytes.fromhex(digits) for name, digits in found.items()}
