"""Loading cuBLAS, cuDNN and torch's own kernels in a thread: a process's first calls of them wait for that."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import torch
from torch.nn import functional as F

HEADS, TOKENS, DIM = 8, 64, 128
"""The shape of the calls: small, and one that cuDNN's attention takes."""


_loading: list[Thread] = []
"""Threads of `load_in_background` for which nobody has waited."""


def load_in_background() -> None:
    """Make a first matmul, a first attention and a few first elementwise calls in a thread.

    torch loads a library or a kernel when it is first used, without Python's lock. `wait` before a CUDA graph is
    captured. Nothing is said about errors: the calls that need the libraries meet them, too.
    """
    thread = Thread(target=_load, name="CUDA libraries", daemon=True)
    _loading.append(thread)
    thread.start()


def wait() -> None:
    """Wait until what `load_in_background` began has ended: a CUDA graph cannot be captured beside it."""
    while _loading:
        _loading.pop().join()


@torch.no_grad()
def _load() -> None:
    with suppress(Exception):
        if not torch.cuda.is_available():
            return
        x = torch.ones(1, HEADS, TOKENS, DIM, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        rows = x.flatten(0, 2)
        F.linear(rows, rows)
        normalised = rows * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1).to(rows.dtype)
        F.silu(torch.cat((-normalised, normalised.cos()), dim=-1)).argmax(-1)
        torch.cuda.synchronize()
