"""A weight in a format: its spec and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.registry import get_format
from semisparse.formats.spec import Params, Scalar, WeightSpec
from semisparse.patterns import Pattern


@dataclass(frozen=True)
class Packed:
    """A weight ``w[N, K]`` in a format.

    Args:
        spec: its format, pattern, shape, dtype and params.
        tensors: one for each `TensorSpec`, by name.
    """

    spec: WeightSpec
    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        """Refuse tensors on several devices: kernels need all of them on one."""
        if torch.compiler.is_compiling():
            return
        devices = {tensor.device for tensor in self.tensors.values()}
        if len(devices) > 1:
            found = ", ".join(f"{name} on {tensor.device}" for name, tensor in self.tensors.items())
            raise FormatError(f"a weight's tensors are on several devices ({found}): move all to one")

    @staticmethod
    def empty(spec: WeightSpec, device: torch.device | str = "meta") -> Packed:
        """Return a weight with uninitialised tensors; on the meta device they have only shapes and dtypes.

        Raises:
            FormatError: as `Format.shapes`.
        """
        form = get_format(spec.format)
        dtypes = form.dtypes(spec)
        shapes = form.shapes(spec)
        return Packed(spec, {name: torch.empty(shapes[name], dtype=dtypes[name], device=device) for name in shapes})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dense weight's dtype."""
        return self.spec.dtype

    @property
    def pattern(self) -> Pattern:
        """The pattern that the weight obeys."""
        return self.spec.pattern

    @property
    def params(self) -> Params:
        """The format's own params."""
        return self.spec.params

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over N * K, metadata and padding included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.tensors.values())).device

    def to(self, device: torch.device | str) -> Packed:
        """Return the same weight on a device, in the layout for that device's kernels; on a CPU the layout on disk."""
        arrange = get_format(self.spec.format).arrange
        target = torch.device(device)
        # Layouts are changed on the faster device: before leaving a GPU, after reaching one.
        leaving = arrange(self, target.type) if self.device.type == "cuda" else self
        moved = Packed(leaving.spec, {name: t.to(target) for name, t in leaving.tensors.items()})
        return arrange(moved, target.type)

    def in_layout(self, params: Mapping[str, Scalar], tensors: dict[str, Tensor]) -> Packed:
        """Return the same weight with the params and tensors of another layout."""
        return Packed(replace(self.spec, params=Params(params)), tensors)

    def unpack(self) -> Tensor:
        """Return the dense weight, [N, K] in ``dtype``, with exact zeros."""
        require_tensors(self)
        return get_format(self.spec.format).unpack(self)


@lru_cache(maxsize=1 << 16)
def _stored_names(spec: WeightSpec) -> frozenset[str]:
    """Return the names of a weight's tensors; cached, because `require_tensors` runs before every matmul."""
    return frozenset(tensor.name for tensor in get_format(spec.format).specs(spec))


def require_tensors(packed: Packed) -> None:
    """Refuse a weight whose tensors are not those that its format stores: without one, a kernel would read address 0.

    Raises:
        FormatError: says which tensors the format stores.
    """
    expected = _stored_names(packed.spec)
    if packed.tensors.keys() != expected:
        raise FormatError(f"format {packed.spec.format} stores {sorted(expected)}, got {sorted(packed.tensors)}")
