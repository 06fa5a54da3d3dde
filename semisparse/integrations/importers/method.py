"""What a reader of another tool's checkpoints declares, and what several readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import CheckpointError

Parts = Mapping[str, Tensor]
"""A layer's tensors, by their names without the layer's."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Rounded:
    """A weight as a tool quantised it: ``(value - zero) * scale``, with one zero and one scale per tile.

    Args:
        values: [N, K] float8_e4m3fn; uint8, from 0 to 2^bits - 1, with a zero point; or int8 without one.
        scale: [ceil(N / rows), ceil(K / columns)] float.
        zero: as ``scale``, int32; None for values without a zero point.
        tile: rows and columns of a tile.
        bits: bits per value.
        rounds_x: whether the tool's kernels quantise x to 8 bits as well; None if the file does not say.
        index: [K] int64, for each column of the weight its column of ``scale``; None if tiles are adjacent columns.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    tile: tuple[int, int]
    bits: int
    rounds_x: bool | None = False
    index: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight, [N, K] float32."""
        weight = self.values.float()
        if self.zero is not None:
            weight -= self._spread(self.zero.float())
        return weight * self._spread(self.scale.float())

    def _spread(self, x: Tensor) -> Tensor:
        """Expand entries per tile to entries per weight, in a shape that broadcasts to [N, K]."""
        (n, k), (rows, columns) = self.values.shape, self.tile
        if rows != 1:
            x = x.repeat_interleave(rows, 0)[:n]
        if self.index is not None:
            return x[:, self.index]
        return x if columns >= k else x.repeat_interleave(columns, 1)[:, :k]


@dataclass(frozen=True)
class Method:
    """How a tool stores the weight of a linear layer.

    Args:
        markers: tensor names, of which a quantised layer has at least one.
        parts: names of all tensors in which a quantised layer's weight is stored.
        measure: (tensors, ``quantization_config``) -> N and K, or all dimensions of a fused weight, after checking
            dtypes, shapes and the number of groups. Tensors of more than 16 numbers are on the meta device.
        read: (tensors, ``quantization_config``) -> the weight, after `measure`: `Rounded`, or else a dense tensor.
        dropped: names of tensors outside quantised layers that a dense model does not have.
        separator: what separates the names of a layer and a part.
        weight: what is appended to a layer's name to get the name of its dense weight.
    """

    markers: frozenset[str]
    parts: frozenset[str]
    measure: Callable[[Parts, Mapping[str, Any]], tuple[int, ...]]
    read: Callable[[Parts, Mapping[str, Any]], Rounded | Tensor]
    dropped: frozenset[str] = frozenset()
    separator: str = "."
    weight: str = ".weight"


def part(tensors: Parts, name: str, dtypes: tuple[torch.dtype, ...], dims: int) -> Tensor:
    """Return one of a layer's tensors after checking its dtype and number of dimensions.

    Raises:
        CheckpointError: it is missing, or has another dtype or number of dimensions.
    """
    if name not in tensors:
        raise CheckpointError(f"tensor {name} is missing; there are {', '.join(sorted(tensors))}")
    tensor = tensors[name]
    if tensor.dtype not in dtypes or tensor.dim() != dims:
        expected = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise CheckpointError(
            f"tensor {name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, expected {expected} with {dims} "
            "dimensions"
        )
    return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the word torch."""
    return str(dtype).removeprefix("torch.")


def require_shape(name: str, tensor: Tensor, expected: tuple[int, ...], why: str) -> None:
    """Refuse a tensor of another shape.

    Raises:
        CheckpointError: names it, what was got and what was expected.
    """
    if tuple(tensor.shape) != expected:
        raise CheckpointError(f"tensor {name} is {list(tensor.shape)}, expected {list(expected)} for {why}")


def require_groups(groups: int, columns: int, declared: Any) -> None:
    """Refuse a number of groups along K that the config does not declare, or that does not divide K.

    Args:
        groups: number of groups of the scales.
        columns: K.
        declared: the config's group size; -1 for whole rows, None if it has none.
    Raises:
        CheckpointError: another number is expected, or the group size is invalid.
    """
    whole = isinstance(declared, int) and not isinstance(declared, bool)
    if declared is not None and (not whole or declared < -1 or declared == 0):
        raise CheckpointError(f"the group size in config.json is {declared!r}, expected a positive integer or -1")
    if declared is None:
        fits = groups > 0 and columns % groups == 0
        expected = f"a divisor of K = {columns}"
    else:
        size = columns if declared == -1 else declared
        fits, expected = groups == -(-columns // size), f"{-(-columns // size)} for K = {columns} in groups of {size}"
    if not fits:
        raise CheckpointError(f"there are {groups} groups of scales along K, expected {expected}")


def columns_per_group(columns: int, groups: int, declared: Any) -> int:
    """Return the columns per group, once `require_groups` has passed."""
    return declared if declared is not None and 0 < declared < columns else -(-columns // groups)


def group_index(tensors: Parts, name: str, columns: int, groups: int, size: int) -> Tensor | None:
    """Return the group of each column by the tensor ``name``; None where groups are adjacent columns.

    Args:
        tensors: the layer's tensors.
        name: name of an integer tensor [columns]; all -1 if it is not used.
        columns: K.
        groups: number of groups.
        size: columns per group, if groups are adjacent columns.
    Raises:
        CheckpointError: a group is out of range.
    """
    if name not in tensors:
        return None
    index = part(tensors, name, INDICES, 1).long()
    require_shape(name, index, (columns,), f"K = {columns}")
    if (index == -1).all() or torch.equal(index, torch.arange(columns) // size):
        return None
    low, high = (int(end) for end in index.aminmax())
    if low < 0 or high >= groups:
        raise CheckpointError(f"tensor {name} names groups {low} to {high}, expected 0 to {groups - 1}")
    return index


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in a stream of bits that fills 32-bit words, the lowest bits first.

    Args:
        words: [W, columns] int32; each column is one stream.
        bits: bits per integer, 2 to 8; an integer may straddle two words (3 bits).
    Returns:
        [32 * W // bits, columns] uint8.
    """
    octets = torch.stack([(words >> shift & 0xFF).to(torch.uint8) for shift in (0, 8, 16, 24)], dim=1).flatten(0, 1)
    if 8 % bits == 0:  # no integer straddles two bytes
        shifts = range(0, 8, bits)
        return torch.stack([octets >> shift & 2**bits - 1 for shift in shifts], dim=1).flatten(0, 1)
    count = 32 * len(words) // bits
    first = torch.arange(count, device=words.device) * bits
    low, shift = octets[first // 8].to(torch.int32), (first % 8)[:, None]
    high = octets[(first // 8 + 1).clamp(max=len(octets) - 1)].to(torch.int32)
    return ((low | high << 8) >> shift & 2**bits - 1).to(torch.uint8)
