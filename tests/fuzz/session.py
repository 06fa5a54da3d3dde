"""The directories that the cases of a run mutate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tests.fuzz.outcome import Outcome, baseline, run_case
from tests.fuzz.sources import SOURCES, write_directory


class Session:
    """Small directories with their logits, each written when the first case mutates it.

    Args:
        root: an empty directory.
        sources: names of `SOURCES`; cases take them in turn.
    """

    def __init__(self, root: Path, sources: Sequence[str] = tuple(SOURCES)) -> None:
        self.root, self.sources = root, sources
        self._written: dict[str, tuple[Path, Tensor]] = {}

    def source_of(self, number: int) -> str:
        """Return the directory that a case mutates."""
        return self.sources[number % len(self.sources)]

    def run(self, seed: int, number: int, source: str | None = None) -> Outcome:
        """Run a case, of another directory than `source_of` says if ``source`` names one."""
        name = source or self.source_of(number)
        if name not in self._written:
            path = write_directory(name, self.root)
            self._written[name] = path, baseline(path)
        return run_case(*self._written[name], seed, number, self.root / "mutated")
