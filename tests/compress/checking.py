"""What several tests of compression compare, and how they interrupt a run."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from semisparse.quant.group import GroupScales


class Interrupted(Exception):
    pass


def equal_weights(model: nn.Module, other: nn.Module) -> bool:
    """Return whether all parameters are equal, bit for bit."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@torch.no_grad()
def hidden_error(model: PreTrainedModel, dense: PreTrainedModel, batches: list[Tensor]) -> float:
    """Relative error of the hidden states after the last decoder layer, over all tokens, in float32."""
    ours, theirs = (torch.cat([m.base_model(ids)[0].flatten(0, 1) for ids in batches]) for m in (model, dense))
    return float((ours - theirs).norm() / theirs.norm())


def is_quantised(weight: Tensor, scales: GroupScales) -> bool:
    """Whether each group of a weight [N, K] is all zero, or ``(code - zero) * scale`` for integer codes in range.

    The stored zero points must be integers from 0 to 255.
    """
    if not torch.equal(scales.zero, scales.zero.to(torch.uint8).float()):
        return False
    for index, group in enumerate(weight.split(scales.size, dim=1)):
        scale, zero = scales.scale[:, [index]].double(), scales.zero[:, [index]].double() / 2 ** (8 - scales.bits)
        codes = (group.double() / scale + zero).round()
        exact = (codes >= 0) & (codes < 2**scales.bits) & (((codes - zero) * scale).to(weight.dtype) == group)
        if not (exact.all(1) | (group == 0).all(1)).all():
            return False
    return True
