"""The memory that the compressed layers of a directory take on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from semisparse.formats.base import Packed, bytes_on_gpu


def layer_bytes_on(layers: Iterable[Packed], capability: tuple[int, int]) -> int:
    """Return about the bytes that layers take on a GPU.

    Args:
        layers: as stored; without values will do.
        capability: the GPU's compute capability. Formats have other tensors than on disk on
            Hopper (9.0) only.
    """
    return sum(bytes_on_gpu(layer) if capability == (9, 0) else layer.nbytes for layer in layers)
