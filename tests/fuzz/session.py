"""The directories that the cases of a run mutate."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.directory import write_directories
from tests.fuzz.outcome import Outcome, baseline, run_case


class Session:
    """Small compressed directories with their logits.

    Args:
        root: an empty directory.
    """

    def __init__(self, root: Path) -> None:
        self.scratch = root / "mutated"
        self.directories = [(path, baseline(path)) for path in write_directories(root)]

    def run(self, seed: int, number: int) -> Outcome:
        """Run a case."""
        directory, expected = self.directories[number % len(self.directories)]
        return run_case(directory, expected, seed, number, self.scratch)
