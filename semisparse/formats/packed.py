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
from semisparse.patterns import NO_ZEROS, Pattern, parse_pattern


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
            places = ", ".join(f"{name} on {tensor.device}" for name, tensor in self.tensors.items())
            raise FormatError(f"a weight's tensors are on several devices ({places}): move all to one")

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

    @staticmethod
    def of_dense(weight: Tensor) -> Packed:
        """Return a weight [N, K] in format ``dense`` without quantisation; it shares the tensor's memory."""
        shape = (weight.shape[0], weight.shape[1])
        spec = WeightSpec("dense", get_format("dense").version, parse_pattern(NO_ZEROS), shape, weight.dtype, Params())
        return Packed(spec, {"values": weight})

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


Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of a weight's tensors, by name."""


@lru_cache(maxsize=1 << 16)
def _stored(spec: WeightSpec) -> Stored:
    """Return `Format.stored`; cached, because `require_tensors` runs before every matmul."""
    return get_format(spec.format).stored(spec)


def require_tensors(packed: Packed, expected: Stored | None = None) -> None:
    """Refuse a weight that lacks a tensor, or has one of another dtype or shape: a kernel would read other memory.

    Their content is not checked (`Format.validate`). Without ``expected``, tensors may go on beyond what the spec says
    along their first dimension: a spec of fewer rows multiplies the first rows.

    Args:
        packed: the weight.
        expected: `Format.stored`, for exactly these shapes; by default that of the format that the spec names.
    Raises:
        FormatError: names the tensor and what it should be.
    """
    if expected is None and packed.__dict__.get("_fits"):  # 0.1 us of each matmul, comparing takes 1.3
        return
    exact, expected = expected is not None, expected or _stored(packed.spec)
    if packed.tensors.keys() != expected.keys():
        raise FormatError(f"format {packed.spec.format} stores {sorted(expected)}, got {sorted(packed.tensors)}")
    for name, tensor in packed.tensors.items():
        dtype, shape = expected[name]
        longer = (
            not exact and tensor.dim() == len(shape) > 0 and tensor.shape[1:] == shape[1:] and len(tensor) > shape[0]
        )
        if tensor.dtype != dtype or (tensor.shape != shape and not longer):
            raise FormatError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)} for "
                f"N, K = {packed.spec.shape}"
            )
    object.__setattr__(packed, "_fits", True)
