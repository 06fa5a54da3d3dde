"""The contract of a format: how a weight is stored, checked and multiplied, declared once as data."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError, InputError, KernelError
from semisparse.formats.kernel import Kernel, Pass, Problem, fused_cost
from semisparse.patterns import Pattern, parse_pattern

Params = Mapping[str, int | float | str]


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor.

    Args:
        name: its name below the module's, as in ``model.layers.0.mlp.up_proj.<name>``.
        dtype: torch dtype, or None for the weight's own (float16, bfloat16 or float32).
        shape: one name a dimension: ``N``, ``K``, or a count the format names; ``N+1`` adds one, for offsets from 0.
        split_n: the dimension that tensor parallelism may cut by output features, if any; where another tensor of the
            format has one, a tensor without it is the same in every part.
        split_k: the dimension that it may cut by input features, if any, likewise.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[str, ...]
    split_n: int | None = None
    split_k: int | None = None


@dataclass(frozen=True)
class Packed:
    """A weight ``w[N, K]`` in a format.

    Args:
        format: the format's name.
        version: the version of its layout.
        pattern: what the weight obeys.
        shape: (N, K).
        dtype: of the weight that was packed, and of the one that `unpack` gives.
        params: the format's own numbers (JSON scalars), such as data-dependent counts and bit widths.
        tensors: one for each `TensorSpec`.
        declaration: all of the above but the tensors, as JSON; made here. It is what a traced graph keeps of them, and
            handing it on spares a module that swaps tensors at every call the work of making it.
    """

    format: str
    version: int
    pattern: Pattern
    shape: tuple[int, int]
    dtype: torch.dtype
    params: Params
    tensors: dict[str, Tensor]
    declaration: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.declaration:
            object.__setattr__(self, "declaration", _declare(self))

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
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
        """Give the same weight on a device, in the layout that its kernels want; a CPU's is the layout on disk."""
        arrange = get_format(self.format).arrange
        target = torch.device(device)
        # Layouts are changed on the faster device: before leaving a GPU, after reaching one.
        leaving = arrange(self, target.type) if self.device.type == "cuda" else self
        moved = replace_tensors(leaving, {name: t.to(target) for name, t in leaving.tensors.items()})
        return arrange(moved, target.type)

    def unpack(self) -> Tensor:
        """Give the weight back, [N, K] in ``dtype``, with exact zeros."""
        return get_format(self.format).unpack(self)


def _declare(packed: Packed) -> str:
    return json.dumps(
        {
            "format": packed.format,
            "version": packed.version,
            "pattern": str(packed.pattern),
            "shape": packed.shape,
            "dtype": str(packed.dtype).removeprefix("torch."),
            "params": dict(packed.params),
            "tensors": sorted(packed.tensors),
        },
        sort_keys=True,  # a checkpoint sorts them, too, and declarations are compared
    )


def replace_tensors(packed: Packed, tensors: dict[str, Tensor]) -> Packed:
    """Give the same declaration with other tensors, of the same names."""
    return Packed(
        packed.format,
        packed.version,
        packed.pattern,
        packed.shape,
        packed.dtype,
        packed.params,
        tensors,
        packed.declaration,
    )


def in_layout(packed: Packed, params: Params, tensors: dict[str, Tensor]) -> Packed:
    """Give the same weight as another layout declares and stores it."""
    return Packed(packed.format, packed.version, packed.pattern, packed.shape, packed.dtype, params, tensors)


@dataclass(frozen=True)
class Case:
    """A weight for the contract tests: [N, K] float32 that obeys ``pattern``, and what is special about it."""

    name: str
    pattern: str
    weight: Callable[[], Tensor]


@dataclass(frozen=True)
class Format:
    """A way to store a weight that obeys a pattern, with the kernels that compute on it.

    Args:
        name: the folder's name.
        version: of the layout; a checkpoint with another one is refused.
        summary: a line for ``semisparse formats``.
        accepts: None if the format can store this pattern, else the reason why not.
        specs: the stored tensors for a pattern and the format's params.
        counts: the named dimensions of the specs, from (N, K, pattern, params).
        pack_weight: (weight [N, K], pattern, options) -> (params, tensors); the weight has passed ``pattern.check``.
        unpack: Packed -> weight [N, K] in its dtype.
        check_content: raise `FormatError` unless every index, offset, count and bit mask lies inside the shape; it may
            rely on names, dtypes and shapes having been checked.
        kernels: in order of preference; `reference_kernel` is appended.
        cases: edge cases of its own for the contract tests.
        recipes: built-in recipes that end in this format, name -> settings.
        lossless: whether unpack gives the packed weight bit for bit.
        cost: (problem, packed weight's bytes) -> the passes of a product, for `plan` and the bench's floors.
        variants: the pack options worth planning and measuring.
        grain: (pattern, params) -> the rows and columns at whose multiples tensors with a declared split may be cut, or
            weights stacked; None if they are not to be.
        regroup: (parts, dim, start, stop, pattern) -> rows (``dim`` 0) or columns ``start`` to ``stop`` of the parts
            side by side, declared as ``pattern`` and not rounded again; None if packing what unpack gives does that.
        stack: (weights one above the other, rows in all) -> the params of them as one, whose tensors are theirs behind
            one another, offsets counted on; None if theirs do not join. Without it, the declared splits tell.
        arrange: (packed, device type) -> the same weight, where it is, in the layout that kernels on such a device
            want; that of ``cpu`` is the layout on disk.
    """

    name: str
    version: int
    summary: str
    accepts: Callable[[Pattern], str | None]
    specs: Callable[[Pattern, Params], tuple[TensorSpec, ...]]
    counts: Callable[[int, int, Pattern, Params], Mapping[str, int]]
    pack_weight: Callable[..., tuple[Params, dict[str, Tensor]]]
    unpack: Callable[[Packed], Tensor]
    check_content: Callable[[Packed], None]
    kernels: tuple[Kernel, ...] = ()
    cases: tuple[Case, ...] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lossless: bool = True
    cost: Callable[[Problem, float], tuple[Pass, ...]] = fused_cost
    variants: tuple[Mapping[str, Any], ...] = ({},)
    grain: Callable[[Pattern, Params], tuple[int, int]] | None = None
    regroup: Callable[[Sequence[Packed], int, int, int, Pattern], Packed] | None = None
    stack: Callable[[Sequence[Packed], int], Params | None] | None = None
    arrange: Callable[[Packed, str], Packed] = lambda packed, device_type: packed

    def pack(self, weight: Tensor, pattern: Pattern | str, **options: Any) -> Packed:
        """Store a weight.

        Args:
            weight: [N, K], float16, bfloat16 or float32, obeying ``pattern``.
            options: the format's own (quantisation parameters, widths).
        Raises:
            PatternError: the weight breaks the pattern; names the first offending row and block.
            FormatError: the format cannot store this pattern or dtype, or the weight is not finite.
        """
        pattern = parse_pattern(pattern)
        reason = self.accepts(pattern)
        if reason:
            raise FormatError(f"format {self.name} cannot store pattern {pattern}: {reason}")
        if weight.dtype not in WEIGHT_DTYPES:
            raise FormatError(f"format {self.name} stores float16, bfloat16 or float32 weights, got {weight.dtype}")
        if not weight.numel():
            raise FormatError(f"format {self.name} cannot store an empty weight {list(weight.shape)}")
        pattern.check(weight)
        if not weight.isfinite().all():
            row, column = (~weight.isfinite()).nonzero()[0].tolist()
            raise FormatError(f"the weight holds {weight[row, column].item()} at row {row}, column {column}")
        params, tensors = self.pack_weight(weight.detach(), pattern, **options)
        shape = (weight.shape[0], weight.shape[1])
        return Packed(self.name, self.version, pattern, shape, weight.dtype, params, tensors)

    def shapes(self, n: int, k: int, pattern: Pattern, params: Params) -> dict[str, tuple[int, ...]]:
        """Give every stored tensor's shape.

        Raises:
            FormatError: N or K is below 1, or ``params`` lacks a count that a shape needs or holds an impossible one.
        """
        if n < 1 or k < 1:
            raise FormatError(f"format {self.name} stores weights with N, K of at least 1, got {(n, k)}")
        try:
            counts = {"N": n, "K": k, **self.counts(n, k, pattern, params)}
            return {s.name: tuple(_size(d, counts) for d in s.shape) for s in self.specs(pattern, params)}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"format {self.name}: params {dict(params)} do not give every dimension: {error}"
            ) from error

    def dtypes(self, weight_dtype: torch.dtype, pattern: Pattern, params: Params) -> dict[str, torch.dtype]:
        """Give every stored tensor's dtype."""
        return {s.name: s.dtype or weight_dtype for s in self.specs(pattern, params)}

    def validate(self, packed: Packed) -> None:
        """Check everything a kernel will rely on: names, dtypes, shapes, and every index, offset, count and bit mask.

        Raises:
            FormatError: names the tensor and what is wrong with it.
        """
        if packed.version != self.version:
            raise FormatError(
                f"format {self.name} version {packed.version} is unknown; this semisparse reads version {self.version}"
            )
        reason = self.accepts(packed.pattern)
        if reason:
            raise FormatError(f"format {self.name} cannot store pattern {packed.pattern}: {reason}")
        shapes = self.shapes(*packed.shape, packed.pattern, packed.params)
        dtypes = self.dtypes(packed.dtype, packed.pattern, packed.params)
        if set(packed.tensors) != set(shapes):
            raise FormatError(f"format {self.name} stores {sorted(shapes)}, got {sorted(packed.tensors)}")
        for name, tensor in packed.tensors.items():
            if tensor.dtype != dtypes[name] or tuple(tensor.shape) != shapes[name]:
                raise FormatError(
                    f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {dtypes[name]} {list(shapes[name])} for N, K = {packed.shape}"
                )
        self.check_content(packed)

    def choose(self, problem: Problem, kernel: str = "auto") -> Kernel:
        """Take the first kernel that can compute ``problem`` and pays there, or the one asked for by name.

        Raises:
            KernelError: none can, or the named one cannot; gives every candidate's reason.
            InputError: no kernel has that name.
        """
        candidates = self.all_kernels
        if kernel != "auto":
            candidates = tuple(c for c in candidates if c.name == kernel)
            if not candidates:
                known = ", ".join(c.name for c in self.all_kernels)
                raise InputError(f"format {self.name} has no kernel {kernel!r}; it has auto, {known}")
        refusals, able = [], []
        for candidate in candidates:
            reason = candidate.refusal(problem)
            if reason is not None:
                refusals.append(f"{candidate.name}: {reason}")
            elif candidate.pays(problem):
                return candidate
            else:
                able.append(candidate)
        if able:
            return able[0]
        raise KernelError(f"no kernel of format {self.name} can compute {problem}: " + "; ".join(refusals))

    @property
    def all_kernels(self) -> tuple[Kernel, ...]:
        """The format's kernels and, last, the reference."""
        return (*self.kernels, reference_kernel)


WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _size(dimension: str, counts: Mapping[str, int]) -> int:
    name, plus, extra = dimension.partition("+")
    size = int(counts[name]) + (int(extra) if plus else 0)
    if size < 0:
        raise ValueError(f"{dimension} = {size}")
    return size


def _reference(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    wide = torch.float32 if x.dtype != torch.float64 else torch.float64
    y = F.linear(x.to(wide), packed.unpack().to(wide), None if bias is None else bias.to(wide))
    return y.to(x.dtype)


reference_kernel = Kernel("reference", None, lambda problem: None, lambda problem: _reference, lambda problem: False)
"""Unpack the whole weight and multiply in float32: right everywhere, fast nowhere."""


@cache
def format_names() -> tuple[str, ...]:
    """List the folders of ``semisparse/formats``, each of which declares its format as ``FORMAT``."""
    import semisparse.formats as package

    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg))


@cache
def get_format(name: str) -> Format:
    """Look a format up by name; its folder is imported now, the others when they are asked for.

    Raises:
        InputError: there is none; lists the known ones.
    """
    if name not in format_names():
        raise InputError(f"unknown format {name!r}; known: {', '.join(format_names())}")
    declared: Format = importlib.import_module(f"semisparse.formats.{name}").FORMAT
    if declared.name != name:
        raise ImportError(f"formats/{name} declares a format named {declared.name}")
    return declared


def registry() -> dict[str, Format]:
    """Every format, by name."""
    return {name: get_format(name) for name in format_names()}
