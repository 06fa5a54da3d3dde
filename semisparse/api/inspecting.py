"""What a model directory holds, and whether it is what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from semisparse import checkpoint
from semisparse.integrations.loading import check_fits


def inspect_directory(
    path: str | Path, verify: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Describe a model directory, as `checkpoint.inspect_directory` does.

    Args:
        path: dense or compressed.
        verify: validate every packed tensor, and check that the tensors are those of the model in config.json.
        progress: called with (layers done, all layers).
    Raises:
        CheckpointError: the directory is incomplete or corrupted, or its tensors are not the model's.
    """
    found = checkpoint.inspect_directory(path, verify, progress)
    if verify:
        check_fits(path)
    return found
