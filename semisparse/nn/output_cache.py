"""The cached output of a joined matmul, and the conditions under which another layer may use it.

Between the calls of q, k and v a caller may write to x, or pass another tensor. It may change the stream or the
autograd mode, or capture only one of the calls in a CUDA graph. The cached output is then discarded. Writes that bypass
autograd's version counter (``x.data``, memory shared with numpy) are not detected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CacheKey = tuple[Any, ...]


class CachedOutput(NamedTuple):
    """The output of a joined matmul, until every layer has read its slice.

    Args:
        x: the input [..., K].
        key: `cache_key` of x when y was computed.
        y: the output [..., N] of all layers.
        taken: for each layer, whether it has read its slice.
    """

    x: Tensor
    key: CacheKey
    y: Tensor
    taken: list[bool]

    def is_valid(self, x: Tensor, key: CacheKey | None) -> bool:
        """Return whether computing the matmul of x now would give y.

        Args:
            x: the input of a layer.
            key: its `cache_key` now.
        """
        if self.x is not x or self.key != key:
            return False
        if not torch.compiler.is_dynamo_compiling():
            return True
        from semisparse.nn.traced import is_current

        return is_current(self.y, x)


def cache_key(x: Tensor) -> CacheKey | None:
    """Return what must be unchanged for a cached output of x to be valid.

    The key is x's version, the inference and autocast modes and, on a GPU, the stream and whether it is being captured.

    Returns:
        The key; None if changes of x cannot be detected or gradients flow through it, so that nothing may be cached.
    """
    if torch.compiler.is_dynamo_compiling():
        return ()  # `traced.is_current` compares versions while dynamo traces
    if not isinstance(x, Tensor) or x.is_inference() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    mode = x._version, torch.is_inference_mode_enabled(), torch.is_autocast_enabled(x.device.type)
    if not x.is_cuda:
        return mode
    # Another stream must not read what this one has written, and a captured kernel has not written anything yet.
    return *mode, torch.cuda.current_stream(x.device), torch.cuda.is_current_stream_capturing()
