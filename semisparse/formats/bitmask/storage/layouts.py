"""Which layout a weight has, ``rows`` (disk.py) or ``tiles`` (gpu.py), and what depends on it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec, choice_of
from semisparse.formats.bitmask.storage import disk, gpu

LAYOUTS = ("rows", "tiles")


def layout_of(params: Params) -> str:
    """Return the layout that ``params`` name; ``rows`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("bitmask", params, "layout", LAYOUTS, default="rows")


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return gpu.SPECS if layout_of(spec.params) == "tiles" else disk.specs(spec)


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    return gpu.counts(spec) if layout_of(spec.params) == "tiles" else disk.counts(spec)


def unpack(packed: Packed) -> Tensor:
    """Return the dense weight, [N, K] in its dtype."""
    return disk.unpack(arrange(packed, "cpu"))


def arrange(packed: Packed, device_type: str) -> Packed:
    """Return the weight in the layout for a device type, on the device it is on: ``tiles`` for a GPU if possible."""
    wanted = "tiles" if device_type == "cuda" and gpu.refusal(packed.spec) is None else "rows"
    if layout_of(packed.params) == wanted:
        return packed
    return gpu.to_tiles(packed) if wanted == "tiles" else gpu.to_rows(packed)
