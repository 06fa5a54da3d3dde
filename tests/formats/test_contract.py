"""What every format promises, over the registry: a new format is tested by being there."""

import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semisparse.errors import FormatError, InputError, KernelError, PatternError
from semisparse.formats import Case, Format, Kernel, Packed, linear, registry
from semisparse.formats.base import WEIGHT_DTYPES
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns, build, cases_of, random

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS = (1, 2, 7, 16, 17, 65)
ROUNDOFF = {"cpu": 2.0**-24, "cuda": 2.0**-23}
"""Of one float32 addition: to nearest on a CPU; tensor cores cut off."""


@functools.cache
def packed_weight(chosen: str, case: Case, dtype: torch.dtype, device: str) -> Packed:
    return registry()[chosen].pack(case.weight().to(dtype).to(device), case.pattern)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(value) -> str:
    if isinstance(value, torch.dtype):
        return short(value)
    return value if isinstance(value, str) else value.name


def params(*columns):
    """Make parameters that are named by their own names."""
    return [pytest.param(*row, id="-".join(map(label, row))) for row in columns]


FORMATS = [pytest.param(f, id=f.name) for f in registry().values()]
CASES = [(f, case) for f in registry().values() for case in cases_of(f.name)]
KERNELS = [
    (f, kernel, device)
    for f, device in itertools.product(registry().values(), DEVICES)
    for kernel in f.all_kernels
    if kernel.device in (None, device)
]
STORED = [(f, case, dtype, device) for (f, case), dtype, device in itertools.product(CASES, WEIGHT_DTYPES, DEVICES)]
COMPUTED = [(*row, case) for row in KERNELS for case in cases_of(row[0].name)]


@pytest.fixture
def nan_filled_memory():
    """Make torch fill every newly allocated tensor with NaN, the kernels' outputs and scratch among them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random_operands(packed: Packed, m: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    n, k = packed.shape
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).to(dtype).to(device)
    return x, torch.randn(n, generator=generator).to(dtype).to(device)


def check_product(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None, multiplied: Tensor | None = None) -> None:
    """Compare with float64: an error of K float32 additions, then one rounding to the output's dtype.

    With a bias the product may be rounded before: torch's own linear does so for one or two tokens on a GPU. What x is
    ``multiplied`` as is x itself, unless a kernel rounds it.
    """
    wide_x = (x if multiplied is None else multiplied).double()
    assert y.dtype == x.dtype
    off = min(_excess(y, wide_x, weight, bias, packed.shape[1]) for weight in _weights(packed))
    assert off <= 0, f"bias {bias is not None}: off by {off:.3g} more than rounding explains"


def _weights(packed: Packed) -> list[Tensor]:
    """Give what a kernel may multiply by: the unpacked weight and, where that rounds what is stored, what is stored."""
    form = registry()[packed.format]
    if form.lossless:
        return [packed.unpack().double()]
    own = [spec.name for spec in form.specs(packed.pattern, packed.params) if spec.dtype is None]
    widened = {name: packed.tensors[name].float() for name in own}
    wide = replace(packed, dtype=torch.float32, tensors={**packed.tensors, **widened}, declaration="")
    return [packed.unpack().double(), wide.unpack().double()]


def _excess(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> float:
    """Give by how much an output is off at most, beyond what rounding explains; NaN counts as infinity."""
    wide_bias = torch.zeros(len(weight), device=x.device) if bias is None else bias.double()
    product = x @ weight.T
    exact = product + wide_bias
    assert y.shape == exact.shape
    magnitude = x.abs() @ weight.abs().T + wide_bias.abs()
    accumulated = (columns + 2) * ROUNDOFF[x.device.type] * magnitude
    facts = torch.finfo(y.dtype)
    rounded = facts.eps / 2 * (exact.abs() + accumulated) + facts.smallest_normal * facts.eps
    if bias is not None:
        rounded += facts.eps / 2 * (product.abs() + accumulated)
    excess = (y.double() - exact).abs() - accumulated - rounded
    return excess.nan_to_num(nan=float("inf")).max().item()


def run(kernel: Kernel, x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    reason = kernel.refusal(problem_of(x.reshape(-1, x.shape[-1]), packed))
    if reason:
        pytest.skip(f"{packed.format}'s kernel {kernel.name} refuses: {reason}")
    return linear(x, packed, bias, kernel.name)


# What is stored


@pytest.mark.parametrize(("chosen", "case", "dtype", "device"), params(*STORED))
def test_round_trip(chosen: Format, case: Case, dtype: torch.dtype, device: str):
    weight = case.weight().to(dtype)
    packed = packed_weight(chosen.name, case, dtype, device)
    chosen.validate(packed)
    unpacked = packed.unpack()
    assert unpacked.device.type == device
    assert (unpacked.shape, unpacked.dtype, packed.shape) == (weight.shape, dtype, tuple(weight.shape))
    parse_pattern(case.pattern).check(unpacked)
    if chosen.lossless:
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        # Adding 0.0 only turns -0.0, which a format may keep or not, into 0.0.
        assert torch.equal((unpacked.cpu() + 0.0).view(integer), (weight + 0.0).view(integer)), "not bit for bit"


@pytest.mark.parametrize(("chosen", "case"), params(*CASES))
def test_the_declaration_is_what_is_stored(chosen: Format, case: Case):
    packed = packed_weight(chosen.name, case, torch.float16, "cpu")
    shapes = chosen.shapes(*packed.shape, packed.pattern, packed.params)
    dtypes = chosen.dtypes(packed.dtype, packed.pattern, packed.params)
    assert {name: tuple(t.shape) for name, t in packed.tensors.items()} == shapes
    assert {name: t.dtype for name, t in packed.tensors.items()} == dtypes
    assert all(t.is_contiguous() and not t.requires_grad for t in packed.tensors.values())
    stored = sum(8 * dtypes[name].itemsize * torch.Size(shape).numel() for name, shape in shapes.items())
    assert packed.bits_per_weight == stored / (packed.shape[0] * packed.shape[1])
    assert json.loads(json.dumps(packed.params)) == packed.params
    assert (packed.format, packed.version) == (chosen.name, chosen.version)


@pytest.mark.parametrize("dim", [0, 1], ids=["N", "K"])
@pytest.mark.parametrize("chosen", FORMATS)
def test_a_part_of_the_tensors_is_the_packed_part_of_the_weight(chosen: Format, dim: int):
    """Where a format declares a split, the tensors without one are the same in every part."""
    for pattern in accepted_patterns(chosen.name):
        weight = build(parse_pattern(pattern), random, 128, 1280)
        parts = weight.chunk(2, dim)
        if any(parse_pattern(pattern).violation(part != 0) for part in parts):
            continue  # The share of zeros that a pattern counts over more than a part may differ in it.
        whole = chosen.pack(weight, pattern)
        specs = chosen.specs(whole.pattern, whole.params)
        splits = {spec.name: (spec.split_n, spec.split_k)[dim] for spec in specs}
        if set(splits.values()) == {None}:
            continue
        halves = zip(*(_halves(whole.tensors[name], split) for name, split in splits.items()), strict=True)
        for part, tensors in zip(parts, halves, strict=True):
            expected = chosen.pack(part.contiguous(), pattern).tensors
            assert all(torch.equal(expected[name], t) for name, t in zip(splits, tensors, strict=True)), pattern


def _halves(tensor: Tensor, split: int | None) -> tuple[Tensor, ...]:
    return (tensor, tensor) if split is None else tensor.chunk(2, split)


@pytest.mark.parametrize("chosen", FORMATS)
def test_packing_leaves_its_weight_alone_and_takes_parameters(chosen: Format):
    case = cases_of(chosen.name)[0]
    parameter = torch.nn.Parameter(case.weight())
    packed = chosen.pack(parameter, case.pattern)
    assert torch.equal(parameter, case.weight())
    assert not any(t.requires_grad for t in packed.tensors.values())


# What is computed


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=short)
@pytest.mark.parametrize(("chosen", "kernel", "device", "case"), params(*COMPUTED))
def test_product(chosen: Format, kernel: Kernel, case: Case, device: str, m: int, dtype, nan_filled_memory):
    packed = packed_weight(chosen.name, case, dtype, device)
    x, bias = random_operands(packed, m, dtype, device)
    for given in (None, bias):
        y = run(kernel, x, packed, given)
        check_product(y, x, packed, given)
        assert torch.equal(y, run(kernel, x, packed, given)), "two calls differ"


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=short)
@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_product_with_another_dtype_than_the_weights(chosen: Format, kernel: Kernel, device: str, dtype: torch.dtype):
    for weight_dtype in WEIGHT_DTYPES:
        packed = packed_weight(chosen.name, cases_of(chosen.name)[0], weight_dtype, device)
        for m in (2, 65):
            x, bias = random_operands(packed, m, dtype, device)
            check_product(run(kernel, x, packed, bias), x, packed, bias)


@pytest.mark.parametrize("m", [5, 65])
@pytest.mark.parametrize(("chosen", "kernel", "device", "case"), params(*COMPUTED))
def test_product_of_x_in_any_layout(chosen: Format, kernel: Kernel, device: str, case: Case, m: int):
    packed = packed_weight(chosen.name, case, torch.float16, device)
    x, bias = random_operands(packed, m, torch.float16, device)
    columns_first, strided = x.T.contiguous().T, torch.stack((x, x), -1)[..., 0]
    for same_x in (columns_first, strided):
        check_product(run(kernel, same_x, packed, bias), x, packed, bias)
    check_product(run(kernel, x[None], packed, bias)[0], x, packed, bias)


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_a_token_that_is_not_finite_is_seen_and_spoils_no_other(
    chosen: Format, kernel: Kernel, device: str, bad: float, m: int
):
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16, device)
    x, bias = random_operands(packed, m, torch.float16, device)
    expected = run(kernel, x, packed, bias)
    x[1] = bad
    y = run(kernel, x, packed, bias)
    others = torch.arange(m, device=device) != 1
    assert torch.equal(y[others], expected[others])
    assert not y[1, packed.unpack().any(1)].isfinite().any()


@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_product_of_no_tokens(chosen: Format, kernel: Kernel, device: str):
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16, device)
    n, k = packed.shape
    for shape in ((0, k), (2, 0, k)):
        y = run(kernel, torch.zeros(shape, dtype=torch.float16, device=device), packed)
        assert y.shape == (*shape[:-1], n)


@pytest.mark.parametrize("chosen", FORMATS)
def test_a_kernel_that_cannot_run_says_why(chosen: Format):
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16, "cpu")
    x = torch.zeros(1, packed.shape[1], dtype=torch.float16)
    for kernel in chosen.kernels:
        reason = kernel.refusal(problem_of(x, packed))
        if reason:
            with pytest.raises(KernelError, match=re.escape(f"{kernel.name}: {reason}")):
                linear(x, packed, kernel=kernel.name)
    with pytest.raises(InputError, match="has no kernel 'abacus'; it has auto, "):
        linear(x, packed, kernel="abacus")
    with pytest.raises(InputError, match="features"):
        linear(x[:, :-1], packed)
    with pytest.raises(InputError, match="bias"):
        linear(x, packed, torch.zeros(packed.shape[0] + 1))


# What is refused


@pytest.mark.parametrize("chosen", FORMATS)
def test_a_weight_that_cannot_be_packed_is_refused(chosen: Format):
    case = cases_of(chosen.name)[0]
    for bad in (float("nan"), float("inf")):
        weight = case.weight()
        row, column = weight.nonzero()[3].tolist()
        weight[row, column] = bad
        with pytest.raises(FormatError, match=f"row {row}, column {column}"):
            chosen.pack(weight, case.pattern)
    with pytest.raises(FormatError, match="float64"):
        chosen.pack(case.weight().double(), case.pattern)
    with pytest.raises(FormatError, match="empty"):
        chosen.pack(torch.zeros(0, 64), case.pattern)


@pytest.mark.parametrize(("chosen", "case"), params(*CASES))
def test_a_weight_that_breaks_its_pattern_is_located(chosen: Format, case: Case):
    pattern = parse_pattern(case.pattern)
    dense = torch.ones(64, 256)
    if pattern.density == 1:
        pytest.skip(f"nothing breaks {pattern}")
    with pytest.raises(PatternError, match=r"row \d+"):
        chosen.pack(dense, pattern)


def refuses(chosen: Format, packed: Packed) -> bool:
    try:
        chosen.validate(packed)
    except FormatError:
        return True
    return False


def corruptions(packed: Packed):
    """Give what is wrong, and the packed weight with it: each must be refused."""
    n, k = packed.shape
    for name, tensor in packed.tensors.items():
        others = {other: t for other, t in packed.tensors.items() if other != name}
        yield f"{name} missing", replace(packed, tensors=others)
        yield f"{name} of another dtype", replace(packed, tensors={**others, name: tensor.to(torch.float64)})
        yield f"{name} of another rank", replace(packed, tensors={**others, name: tensor[None]})
        for dim in range(tensor.dim()):
            if tensor.shape[dim]:
                shorter = tensor.narrow(dim, 0, tensor.shape[dim] - 1)
                yield f"{name} truncated along {dim}", replace(packed, tensors={**others, name: shorter})
    yield "a tensor too many", replace(packed, tensors={**packed.tensors, "more": torch.zeros(1)})
    for shape in ((n + 1, k), (n - 1, k), (n, k + 256), (n, 0), (-n, k), (n, -k)):
        yield f"shape {shape}", replace(packed, shape=shape)
    for version in (packed.version + 1, 0):
        yield f"version {version}", replace(packed, version=version)


@pytest.mark.parametrize(("chosen", "case"), params(*CASES))
def test_corrupted_weights_are_refused(chosen: Format, case: Case):
    for what, corrupted in corruptions(packed_weight(chosen.name, case, torch.float16, "cpu")):
        assert refuses(chosen, corrupted), what


@pytest.mark.parametrize(("chosen", "case"), params(*CASES))
def test_params_that_are_not_the_ones_stored_are_refused(chosen: Format, case: Case):
    packed = packed_weight(chosen.name, case, torch.float16, "cpu")
    for key, value in packed.params.items():
        others = {other: v for other, v in packed.params.items() if other != key}
        assert refuses(chosen, replace(packed, params=others)), f"{key} missing"
        numbers = (value + 1, -1, 1 << 80) if isinstance(value, int) else ()
        for wrong in ("nonsense", float("inf"), *numbers):
            assert refuses(chosen, replace(packed, params={**others, key: wrong})), f"{key} = {wrong}"


@pytest.mark.parametrize(("chosen", "case"), params(*CASES))
def test_wild_integers_are_refused_or_harmless(chosen: Format, case: Case):
    """A number out of range must be refused; one that validate lets pass must mean the same to every kernel."""
    packed = packed_weight(chosen.name, case, torch.float16, "cpu")
    generator = torch.Generator().manual_seed(0)
    x, bias = random_operands(packed, 2, torch.float16, "cpu")
    for name, tensor in packed.tensors.items():
        if tensor.is_floating_point() or not tensor.numel():
            continue
        limits = torch.iinfo(tensor.dtype)
        for wild in (limits.min, limits.max, -1 if limits.min else 1, *_random_integers(limits, generator)):
            corrupted = tensor.clone()
            corrupted.view(-1)[torch.randint(tensor.numel(), (), generator=generator)] = wild
            changed = replace(packed, tensors={**packed.tensors, name: corrupted})
            for kernel in () if refuses(chosen, changed) else chosen.all_kernels:
                if kernel.refusal(problem_of(x, changed)) is None:
                    check_product(linear(x, changed, bias, kernel.name), x, changed, bias)


def _random_integers(limits: torch.iinfo, generator: torch.Generator) -> list[int]:
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
    return torch.randint(low, high, (20,), generator=generator).tolist()
