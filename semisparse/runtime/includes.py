"""The texts that a source file includes. They are part of the cache key of its compiled code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


def read_with_includes(path: Path, folders: tuple[Path, ...]) -> dict[str, str]:
    """Read a file and every header that it includes, directly or indirectly.

    Args:
        path: the file.
        folders: the include path. The folder of the including file is searched first.
    Returns:
        The texts by path. Headers that are not found are left out; the compiler finds or reports them.
    """
    texts: dict[str, str] = {}
    pending = [path]
    while pending:
        current = pending.pop()
        if str(current) in texts:
            continue
        texts[str(current)], included = _read(current)
        for name in included:
            candidates = [current.parent / name, *(folder / name for folder in folders)]
            pending += [candidate for candidate in candidates if candidate.is_file()][:1]
    return texts


@cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a file's text and the names it includes. Cached by path: CUDA's headers are a megabyte."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text, tuple(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE))
