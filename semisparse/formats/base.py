"""The contract of a format: how a weight is stored and checked, and which kernels use it, declared once as data.

What a format's declaration is made of can be imported from here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError, InputError, KernelError
from semisparse.formats.checks import choice_of, refuse_first, refuse_infinite, require_codes, share_violation
from semisparse.formats.codes import Codes
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct, Kernel, Pass, Problem, one_pass_cost
from semisparse.formats.packed import Packed, Stored, require_tensors
from semisparse.formats.registry import format_names, get_format, registry
from semisparse.formats.spec import WEIGHT_DTYPES, Params, Scalar, TensorSpec, WeightSpec
from semisparse.formats.tuned import ranking
from semisparse.patterns import Pattern, parse_pattern
from semisparse.runtime.device import GENERATIONS

__all__ = [
    "WEIGHT_DTYPES",
    "Case",
    "Codes",
    "Format",
    "Packed",
    "Params",
    "Scalar",
    "TensorSpec",
    "WeightSpec",
    "bytes_on_gpu",
    "choice_of",
    "format_names",
    "get_format",
    "reference_kernel",
    "refuse_first",
    "refuse_infinite",
    "registry",
    "require_codes",
    "require_dense",
    "require_tensors",
    "share_violation",
]

MAX_ELEMENTS = 1 << 57
"""Maximum elements of a stored tensor. torch can describe no more than 2^63 bytes."""

MAX_SHARE, FREE_WEIGHTS = 2048, 1 << 24
"""N * K is at most ``MAX_SHARE`` times the stored bytes, plus ``FREE_WEIGHTS``: a small file must not unpack to a huge
weight. A weight with nothing kept has up to 680 weights per stored byte in gqs and up to 2048 in ec_csr (K <= 2^16).
"""


@dataclass(frozen=True)
class Case:
    """A weight for the contract tests: [N, K] float32 that obeys ``pattern``, named by what is special about it."""

    name: str
    pattern: str
    weight: Callable[[], Tensor]


@dataclass(frozen=True)
class Format:
    """A way to store a weight that obeys a pattern, with the kernels that compute on it.

    Args:
        name: the folder's name.
        version: version of the layout; a checkpoint with another one is refused.
        summary: a line for ``semisparse formats``.
        accepts: None if the format can store this pattern, else the reason why not.
        specs: weight spec -> its stored tensors.
        counts: weight spec -> the sizes of the dimensions that ``specs`` name, other than N and K.
        counted: names of the params that count what is stored, such as non-zeros. Kernels are prepared without them.
        facts: weight spec -> params that are derived from the counted ones, with which kernels are prepared instead.
        tuned_by: names of the params whose values stand in the column ``variant`` of tuned tables.
        pack_weight: (weight [N, K], pattern, options) -> (params, tensors); the weight has passed ``pattern.check``.
        unpack: Packed -> weight [N, K] in its dtype.
        check_content: raise `FormatError` unless every index, offset, count and bit mask lies inside the shape; it may
            rely on names, dtypes and shapes having been checked.
        codes: a weight in the layout on disk -> its `Codes`; None if it is not quantised.
        violation: describe where a weight that has passed ``check_content`` breaks its pattern, or return None. Without
            it the weight is unpacked and compared.
        kernels: in order of preference; `reference_kernel` is appended.
        cases: edge cases of its own for the contract tests.
        recipes: built-in recipes that end in this format, name -> settings.
        lossless: whether unpack returns the packed weight bit for bit.
        cost: (problem, bytes of the packed weight in the problem's layout) -> the passes of a matmul, for `plan` and
            the bench's floors.
        variants: the sets of pack options that `plan` and the benchmarks compare.
        choices: the candidates of a joint search for a layer, each as (pattern, recipe key ``quant``).
        rounds: pattern -> whether recipes may store weights of this pattern in the format's quantised variants.
        options: the pack options that a recipe may set, each with its values; () for any integer of 0 or more.
        grain: weight spec -> (rows, columns): tensors with a split dimension can be sliced, and weights stacked, at
            multiples of these. None if they never can.
        regroup: (weights, dim, start, stop, pattern) -> rows (``dim`` 0) or columns (1) ``start`` to ``stop`` of the
            weights concatenated along ``dim``, with ``pattern``, and without quantising again. None if the format has
            no such function: weights are then unpacked, cut and packed.
        scale_columns: weight spec -> the columns that share a scale; 1 for a weight without scales. Where they are
            separated, weights cannot be packed again without being quantised again.
        stack: (weights to stack along N, total rows) -> the params of the stack, whose tensors are the weights' tensors
            concatenated, with continued offsets; None if these weights cannot be stacked so. If the format has no such
            function, weights can be stacked if every tensor has ``split_n``.
        experts: problem -> the matmuls of a mixture's experts by a fixed number of launches, or None if no kernel can
            compute them. Whether one can does not depend on the number of pairs. None if the format has no such kernel
            for any device.
        spec_on_gpu: (weight spec as on disk, compute capability) -> the spec in the layout that ``arrange`` gives the
            weight on such a GPU, as far as ``cost`` and ``gpu_bytes`` depend on it.
        gpu_bytes: (weight spec as on that GPU, bytes of the tensors on disk) -> about the bytes that the weight takes
            there.
        arrange: (packed, device type) -> the same weight on its present device, in the layout for kernels on the given
            device type. For ``cpu`` that is the layout on disk.
    """

    name: str
    version: int
    summary: str
    accepts: Callable[[Pattern], str | None]
    specs: Callable[[WeightSpec], tuple[TensorSpec, ...]]
    counts: Callable[[WeightSpec], Mapping[str, int]]
    pack_weight: Callable[..., tuple[Mapping[str, Scalar], dict[str, Tensor]]]
    unpack: Callable[[Packed], Tensor]
    check_content: Callable[[Packed], None]
    codes: Callable[[Packed], Codes | None] = lambda packed: None
    violation: Callable[[Packed], str | None] = lambda packed: packed.pattern.violation(packed.unpack() != 0)
    counted: tuple[str, ...] = ()
    facts: Callable[[WeightSpec], Mapping[str, Scalar]] = lambda spec: {}
    tuned_by: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    cases: tuple[Case, ...] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lossless: bool = True
    cost: Callable[[Problem, float], tuple[Pass, ...]] = one_pass_cost
    variants: tuple[Mapping[str, Any], ...] = ({},)
    choices: tuple[tuple[str, str], ...] = ()
    rounds: Callable[[Pattern], bool] = lambda pattern: True
    options: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    grain: Callable[[WeightSpec], tuple[int, int]] | None = None
    regroup: Callable[[Sequence[Packed], int, int, int, Pattern], Packed] | None = None
    scale_columns: Callable[[WeightSpec], int] = lambda spec: 1
    stack: Callable[[Sequence[Packed], int], Mapping[str, Scalar] | None] | None = None
    experts: Callable[[ExpertsProblem], ExpertsProduct | None] | None = None
    spec_on_gpu: Callable[[WeightSpec, tuple[int, int]], WeightSpec] = lambda spec, capability: spec
    gpu_bytes: Callable[[WeightSpec, float], float] = lambda spec, stored: stored
    arrange: Callable[[Packed, str], Packed] = lambda packed, device_type: packed

    def pack(self, weight: Tensor, pattern: Pattern | str, **options: Any) -> Packed:
        """Store a weight.

        Args:
            weight: [N, K], float16, bfloat16 or float32, obeying ``pattern``.
            pattern: what the weight obeys, or its text.
            options: the format's own (quantisation parameters, widths).
        Raises:
            PatternError: the weight breaks the pattern; names the first offending row and block.
            FormatError: the format cannot store this pattern or dtype, has no such option, or the weight is empty or
                not finite.
        """
        require_dense(weight)
        pattern = parse_pattern(pattern)
        reason = self.accepts(pattern)
        if reason:
            raise FormatError(f"format {self.name} cannot store pattern {pattern}: {reason}")
        known = list(inspect.signature(self.pack_weight).parameters)[2:]
        if not set(options) <= set(known):
            unknown = ", ".join(sorted(set(options) - set(known)))
            raise FormatError(f"format {self.name} has no pack option {unknown}; it has {', '.join(known) or 'none'}")
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
        return Packed(WeightSpec(self.name, self.version, pattern, shape, weight.dtype, Params(params)), tensors)

    def structure(self, spec: WeightSpec) -> WeightSpec:
        """Return a spec without the ``counted`` params, with their ``facts`` instead.

        Kernels are chosen and prepared once per structure.
        """
        return replace(spec, params=Params(spec.params.without(*self.counted), **self.facts(spec)))

    def shapes(self, spec: WeightSpec) -> dict[str, tuple[int, ...]]:
        """Return every stored tensor's shape.

        Raises:
            FormatError: N or K is below 1, or the params lack a count that a shape needs or hold an impossible one.
        """
        n, k = spec.shape
        if n < 1 or k < 1:
            raise FormatError(f"format {self.name} stores weights with N, K of at least 1, got {(n, k)}")
        try:
            counts = {"N": n, "K": k, **self.counts(spec)}
            shapes = {tensor.name: tuple(_size(d, counts) for d in tensor.shape) for tensor in self.specs(spec)}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"format {self.name}: params {dict(spec.params)} do not give every dimension: {error}"
            ) from error
        for name, shape in shapes.items():
            if math.prod(shape) > MAX_ELEMENTS:
                raise FormatError(f"format {self.name}: tensor {name} would be {list(shape)}, above 2^57 elements")
        return shapes

    def dtypes(self, spec: WeightSpec) -> dict[str, torch.dtype]:
        """Return every stored tensor's dtype."""
        return {tensor.name: tensor.dtype or spec.dtype for tensor in self.specs(spec)}

    def stored(self, spec: WeightSpec) -> Stored:
        """Return the dtype and shape of each tensor of a weight, by name."""
        dtypes, shapes = self.dtypes(spec), self.shapes(spec)
        return {name: (dtypes[name], shapes[name]) for name in shapes}

    def check_spec(self, spec: WeightSpec) -> None:
        """Check a spec without its tensors.

        Raises:
            FormatError: the version is unknown, the format cannot store the pattern, a shape is impossible, or N * K is
                too large for the stored bytes (`MAX_SHARE`).
        """
        if spec.version != self.version:
            raise FormatError(
                f"format {self.name} version {spec.version} is unknown; this semisparse reads version {self.version}"
            )
        reason = self.accepts(spec.pattern)
        if reason:
            raise FormatError(f"format {self.name} cannot store pattern {spec.pattern}: {reason}")
        shapes, dtypes = self.shapes(spec), self.dtypes(spec)
        stored = sum(math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes)
        n, k = spec.shape
        if n * k > MAX_SHARE * stored + FREE_WEIGHTS:
            raise FormatError(
                f"N, K = {(n, k)} are too many weights for {stored} stored bytes: at most {MAX_SHARE} per byte "
                f"and {FREE_WEIGHTS} more"
            )

    def validate(self, packed: Packed) -> None:
        """Check everything a kernel will rely on: names, dtypes, shapes, and every index, offset, count and bit mask.

        Raises:
            FormatError: names the tensor and what is wrong with it.
        """
        self.check_spec(packed.spec)
        require_tensors(packed, self.stored(packed.spec))
        self.check_content(packed)

    def verify(self, packed: Packed) -> None:
        """Check a weight as `validate` does, and that it obeys its pattern; no kernel relies on the pattern.

        Raises:
            FormatError: names what is wrong.
        """
        self.validate(packed)
        violation = self.violation(packed)
        if violation:
            raise FormatError(f"the weight does not obey pattern {packed.pattern}: {violation}")

    def choose(self, problem: Problem, kernel: str = "auto") -> Kernel:
        """Return the kernel with this name. For ``auto``: the fastest in the tuned tables (on a GPU), else the first
        that pays, else the first that can compute the problem.

        Raises:
            KernelError: none can, or the named one cannot; lists every candidate's reason.
            InputError: no kernel has that name.
        """
        candidates = self.all_kernels
        if kernel != "auto":
            candidates = tuple(c for c in candidates if c.name == kernel)
            if not candidates:
                known = ", ".join(c.name for c in self.all_kernels)
                raise InputError(f"format {self.name} has no kernel {kernel!r}; it has auto, {known}")
        elif problem.device.type == "cuda" and torch.cuda.is_available():
            by_name = {candidate.name: candidate for candidate in candidates}
            for name in ranking(problem, self.tuned_by):
                if name in by_name and by_name[name].refusal(problem) is None:
                    return by_name[name]
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


def bytes_on_gpu(packed: Packed, capability: tuple[int, int] | None = None) -> int:
    """Return about the bytes that a weight in the layout on disk takes on a GPU.

    Args:
        packed: the weight; on the meta device, too.
        capability: the GPU's compute capability; None for the most of all GPUs.
    """
    form = get_format(packed.spec.format)
    gpus = GENERATIONS if capability is None else (capability,)
    return round(max(form.gpu_bytes(form.spec_on_gpu(packed.spec, gpu), packed.nbytes) for gpu in gpus))


def require_dense(weight: object) -> None:
    """Refuse everything but a strided tensor with values.

    Raises:
        FormatError: says what was got.
    """
    if not isinstance(weight, Tensor):
        raise FormatError(f"a weight is a tensor [N, K], got {type(weight).__name__}")
    if weight.layout != torch.strided or weight.device.type == "meta":
        kind = "on the meta device" if weight.device.type == "meta" else f"{weight.layout}"
        raise FormatError(f"a weight is a strided tensor with values, got one that is {kind}")


def _size(dimension: str, counts: Mapping[str, int]) -> int:
    """Return the size of a dimension of a `TensorSpec`, such as ``N`` or ``N+1``."""
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
"""Unpacks the whole weight and computes in float32, or float64 if x is: runs on every device, slowly."""
