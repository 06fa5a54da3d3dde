"""What a source file includes: a compiled file is kept for as long as all of it stays the same."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


def read_with_includes(path: Path, folders: tuple[Path, ...]) -> dict[str, str]:
    """Read a file and everything it includes.

    Args:
        path: the file.
        folders: where headers are looked for that do not stand beside the file that includes them.
    Returns:
        The texts by path. A header that is nowhere is the compiler's to find or to report.
    """
    found: dict[str, str] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if str(current) in found:
            continue
        found[str(current)], included = _read(current)
        for name in included:
            places = [current.parent / name, *(folder / name for folder in folders)]
            waiting += [place for place in places if place.is_file()][:1]
    return found


@cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """Read a file once a process: CUDA's headers are a megabyte."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text, tuple(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE))
