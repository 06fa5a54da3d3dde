"""A product that is remembered for the layers which share it, and when what is remembered must not be used.

Whoever calls them may write the input between two calls, hand over another, change streams or the mode that autograd is
in, capture one call and not the other: the next layer then multiplies anew. Writes that autograd does not see either
(``x.data``, memory shared with numpy) are not seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Setting = tuple[Any, ...]


class Remembered(NamedTuple):
    """A product that layers have not all taken their rows of: its input, how it was made, itself, and who has."""

    x: Tensor
    setting: Setting
    whole: Tensor
    taken: list[bool]

    def holds(self, x: Tensor, setting: Setting | None) -> bool:
        """Whether the product of x, made now, would be this one."""
        if self.x is not x or self.setting != setting:
            return False
        if not torch.compiler.is_dynamo_compiling():
            return True
        from semisparse.nn.traced import is_of_this_trace

        return is_of_this_trace(self.whole, x)


def setting_of(x: Tensor) -> Setting | None:
    """Give what must not have changed since a product was remembered; None if nobody can tell whether it has."""
    if torch.compiler.is_dynamo_compiling():
        return ()  # `traced.is_of_this_trace` tells
    if not isinstance(x, Tensor) or x.is_inference() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    mode = x._version, torch.is_inference_mode_enabled(), torch.is_autocast_enabled(x.device.type)
    if not x.is_cuda:
        return mode
    # What one stream has written another must not read, and what is captured is not written yet.
    return *mode, torch.cuda.current_stream(x.device), torch.cuda.is_current_stream_capturing()
