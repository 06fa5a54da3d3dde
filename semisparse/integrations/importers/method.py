"""What a reader of another tool's checkpoints declares, and the arithmetic that several readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError

Parts = Mapping[str, Tensor]
"""A layer's tensors by the last word of their names."""


@dataclass(frozen=True)
class Method:
    """How a tool stores the weight of a linear layer.

    Args:
        markers: names of tensors of which a quantised layer has at least one.
        parts: names of all tensors that together stand for a quantised layer's weight.
        dequantise: (tensors, ``quantization_config``) -> the dense weight [N, K], float32 or a 16-bit dtype.
        dropped: names of tensors outside quantised layers that a dense model does not have.
    """

    markers: frozenset[str]
    parts: frozenset[str]
    dequantise: Callable[[Parts, Mapping[str, Any]], Tensor]
    dropped: frozenset[str] = frozenset()


def part(tensors: Parts, name: str, dtypes: tuple[torch.dtype, ...], dims: int) -> Tensor:
    """Return one of a layer's tensors after checking its dtype and number of dimensions.

    Raises:
        CheckpointError: it is missing or is something else.
    """
    if name not in tensors:
        raise CheckpointError(f"tensor {name} is missing; there are {', '.join(sorted(tensors))}")
    tensor = tensors[name]
    if tensor.dtype not in dtypes or tensor.dim() != dims:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"tensor {name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
            f"expected {expected} with {dims} dimensions"
        )
    return tensor


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in a stream of bits that fills 32-bit words, the lowest bits first.

    Args:
        words: [W, columns] int32; each column is one stream.
        bits: per integer, 2 to 8; integers may lie in two words (3 bits).
    Returns:
        [32 * W // bits, columns] int32.
    """
    octets = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=1).flatten(0, 1)
    count = 32 * len(words) // bits
    first = torch.arange(count, device=words.device) * bits
    low, shift = octets[first // 8], (first % 8)[:, None]
    high = octets[(first // 8 + 1).clamp(max=len(octets) - 1)]
    return ((low | high << 8) >> shift & 2**bits - 1).to(torch.int32)


def groups_of_columns(tensors: Parts, name: str, columns: int, groups: int) -> Tensor:
    """Return the group of each column: from the tensor ``name`` if there is one, else equally many columns per group.

    Args:
        tensors: the layer's.
        name: of an int32 tensor [columns].
        columns: K.
        groups: how many there are.
    Raises:
        CheckpointError: a group is out of range, or the columns cannot be divided among the groups.
    """
    if name in tensors:
        index = part(tensors, name, (torch.int32, torch.int64), 1).long()
        if len(index) == columns and (columns == 0 or (int(index.min()) >= 0 and int(index.max()) < groups)):
            return index
        raise CheckpointError(f"tensor {name} does not name one of {groups} groups for each of {columns} columns")
    if groups == 0 or columns % groups:
        raise CheckpointError(f"{columns} columns cannot be divided among {groups} groups")
    return torch.arange(columns, device=next(iter(tensors.values())).device) // (columns // groups)
