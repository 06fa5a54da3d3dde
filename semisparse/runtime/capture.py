"""The stream on which CUDA graphs are captured."""

from __future__ import annotations

from functools import cache

import torch


def capture_stream() -> torch.cuda.Stream:
    """Return the current GPU's stream for captures, always the same: graphs that share a pool reuse its memory.

    Without a stream, torch captures on one of the GPU that was current at the process's first capture.
    """
    return _stream(torch.cuda.current_device())


@cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
