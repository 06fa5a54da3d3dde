"""The format contract, tested for every registered format.

Every case meets every kernel, and so does every pair of number of tokens, dtype, bias and layout of x: pairs, not
products, of what may interact. On a GPU weights come through ``.to``, in the layout of the kernels there.
"""

import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from semisparse.errors import FormatError, InputError, KernelError, PatternError
from semisparse.formats import Case, Format, Kernel, Packed, WeightSpec, linear, registry
from semisparse.formats.base import WEIGHT_DTYPES
from semisparse.formats.kernel import bucket_of
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns, build, cases_of, random
from tests.formats.checking import check_product, operands

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS = (1, 2, 7, 16, 17, 40, 65, 200)
LAYOUTS = ("contiguous", "columns first", "strided", "unaligned")
"""Layouts of x in memory."""


def pairwise(*factors: tuple) -> list[tuple]:
    """Return rows in which every two values of different factors meet; greedily few."""
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a in factors[i]
        for b in factors[j]
    }
    rows = []
    while pairs:
        best = max(
            itertools.product(*factors),
            key=lambda row: len(pairs & set(itertools.combinations(enumerate(row), 2))),
        )
        pairs -= set(itertools.combinations(enumerate(best), 2))
        rows.append(best)
    return rows


ROWS = pairwise(TOKENS, WEIGHT_DTYPES, (True, False), LAYOUTS)
"""(tokens, dtype, bias, layout of x)."""


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(value) -> str:
    if isinstance(value, torch.dtype):
        return short(value)
    return value.name if isinstance(value, Case | Format | Kernel) else str(value)


def params(*columns):
    """Make parameters that are named by their own names."""
    return [pytest.param(*row, id="-".join(map(label, row))) for row in columns]


FORMATS = [pytest.param(f, id=f.name) for f in registry().values()]
CASES = [(f, case, WEIGHT_DTYPES[i % 3]) for f in registry().values() for i, case in enumerate(cases_of(f.name))]
KERNELS = [
    (f, kernel, device)
    for f, device in itertools.product(registry().values(), DEVICES)
    for kernel in f.all_kernels
    if kernel.device in (None, device)
]
COMPUTED = [(*kernel, number) for kernel in KERNELS for number in range(max(len(ROWS), len(cases_of(kernel[0].name))))]


@functools.cache
def packed_weight(chosen: str, case: Case, dtype: torch.dtype, device: str = "cpu") -> Packed:
    return registry()[chosen].pack(case.weight().to(dtype).to(device), case.pattern).to(device)


def in_memory(x: Tensor, layout: str) -> Tensor:
    """Return the same x in a layout of `LAYOUTS`."""
    if layout == "columns first":
        return x.T.contiguous().T
    if layout == "strided":
        return torch.stack((x, x), -1)[..., 0]
    if layout == "unaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    return x


def refused(kernel: Kernel, x: Tensor, packed: Packed) -> str | None:
    return kernel.refusal(problem_of(x.reshape(-1, x.shape[-1]), packed))


def run(kernel: Kernel, x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    reason = refused(kernel, x, packed)
    if reason:
        pytest.skip(f"{packed.spec.format}'s kernel {kernel.name} refuses: {reason}")
    return linear(x, packed, bias, kernel.name)


def a_weight_for(kernel: Kernel, chosen: Format, device: str, dtype: torch.dtype, m: int) -> tuple[Packed, Tensor]:
    """Return the first weight that a kernel multiplies m tokens with, and x."""
    reasons = []
    for case in cases_of(chosen.name):
        packed = packed_weight(chosen.name, case, dtype, device)
        x, _ = operands(packed, m, dtype)
        reason = refused(kernel, x, packed)
        if reason is None:
            return packed, x
        reasons.append(reason)
    pytest.skip(f"{chosen.name}'s kernel {kernel.name} refuses every weight: {reasons[0]}")


# What is stored


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("chosen", "case", "dtype"), params(*CASES))
def test_round_trip(chosen: Format, case: Case, dtype: torch.dtype, device: str):
    weight = case.weight().to(dtype)
    packed = packed_weight(chosen.name, case, dtype, device)
    chosen.validate(packed)
    check_stored(packed, weight, case.pattern)
    back = packed.to("cpu")
    original = chosen.pack(weight, case.pattern)
    assert back.spec == original.spec
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in original.tensors.items())


def check_stored(packed: Packed, weight: Tensor, pattern: str) -> None:
    unpacked = packed.unpack()
    assert unpacked.device == packed.device
    assert (unpacked.shape, unpacked.dtype, packed.shape) == (weight.shape, weight.dtype, tuple(weight.shape))
    parse_pattern(pattern).check(unpacked)
    if registry()[packed.spec.format].lossless:
        assert same_bits(unpacked.cpu() + 0.0, weight + 0.0), "not bit for bit"  # adding 0.0 turns -0.0 into 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


@pytest.mark.parametrize(("chosen", "case", "dtype"), params(*CASES))
def test_the_spec_is_what_is_stored(chosen: Format, case: Case, dtype: torch.dtype):
    packed = packed_weight(chosen.name, case, dtype)
    spec = packed.spec
    shapes, dtypes = chosen.shapes(spec), chosen.dtypes(spec)
    assert {name: tuple(t.shape) for name, t in packed.tensors.items()} == shapes
    assert {name: t.dtype for name, t in packed.tensors.items()} == dtypes
    assert all(t.is_contiguous() and not t.requires_grad for t in packed.tensors.values())
    stored = sum(8 * dtypes[name].itemsize * torch.Size(shape).numel() for name, shape in shapes.items())
    assert packed.bits_per_weight == stored / (packed.shape[0] * packed.shape[1])
    again = WeightSpec.from_json(spec.json)
    assert (again, hash(again), again.to_dict()) == (spec, hash(spec), json.loads(spec.json))
    assert (spec.format, spec.version) == (chosen.name, chosen.version)
    assert set(chosen.structure(spec).params) == set(spec.params) - set(chosen.counted) | set(chosen.facts(spec))
    assert chosen.structure(chosen.structure(spec)) == chosen.structure(spec)
    empty = Packed.empty(spec)
    assert {n: (t.shape, t.dtype) for n, t in empty.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in packed.tensors.items()
    }


@pytest.mark.parametrize("chosen", FORMATS)
def test_layers_of_one_shape_share_what_is_prepared(chosen: Format):
    for pattern in accepted_patterns(chosen.name):
        parsed = parse_pattern(pattern)
        specs = []
        for seed in (1, 2):
            scores = torch.rand(96, 256, generator=torch.Generator().manual_seed(seed)) + 0.5
            specs.append(chosen.pack(scores * parsed.mask(scores), pattern).spec)
        assert chosen.structure(specs[0]) == chosen.structure(specs[1]), pattern


@pytest.mark.parametrize("dim", [0, 1], ids=["N", "K"])
@pytest.mark.parametrize("chosen", FORMATS)
def test_a_part_of_the_tensors_is_the_packed_part_of_the_weight(chosen: Format, dim: int):
    """If a format declares splits for some tensors, its other tensors are the same in every part."""
    for pattern in accepted_patterns(chosen.name):
        weight = build(parse_pattern(pattern), random, 128, 1280)
        parts = weight.chunk(2, dim)
        if any(parse_pattern(pattern).violation(part != 0) for part in parts):
            continue  # Where a pattern counts zeros over the whole matrix, a part may have another share of them.
        whole = chosen.pack(weight, pattern)
        splits = {tensor.name: (tensor.split_n, tensor.split_k)[dim] for tensor in chosen.specs(whole.spec)}
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


@pytest.mark.parametrize(("chosen", "kernel", "device", "number"), params(*COMPUTED))
def test_product(chosen: Format, kernel: Kernel, device: str, number: int, nan_filled_memory):
    """One case and one row each; where the kernel refuses that row, the next that it takes with the case."""
    case = cases_of(chosen.name)[number % len(cases_of(chosen.name))]
    for row in itertools.islice(itertools.cycle(ROWS), number, number + len(ROWS)):
        m, dtype, with_bias, layout = row
        packed = packed_weight(chosen.name, case, dtype, device)
        x, bias = operands(packed, m, dtype, seed=number)
        if refused(kernel, x, packed) is None:
            break
    given_x, given_bias = in_memory(x, layout), bias if with_bias else None
    y = run(kernel, given_x, packed, given_bias)
    check_product(y, x, packed, given_bias)
    assert torch.equal(y, run(kernel, given_x, packed, given_bias)), "two calls differ"


@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_every_kernel_takes_some_weight(chosen: Format, kernel: Kernel, device: str):
    takes = []
    for m, dtype in itertools.product(TOKENS, WEIGHT_DTYPES):
        for case in cases_of(chosen.name):
            for options in chosen.variants:
                try:
                    packed = chosen.pack(case.weight().to(dtype), case.pattern, **options).to(device)
                except FormatError:
                    continue
                takes.append(refused(kernel, operands(packed, m, dtype)[0], packed))
                if takes[-1] is None:
                    return
    if device == "cuda" or kernel.device is None:
        pytest.skip(f"on {device} {kernel.name} refuses all: {takes[0]}")
    raise AssertionError(f"{kernel.name} refuses every weight: {set(takes)}")


@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_one_preparation_serves_every_number_of_tokens_of_its_bucket(chosen: Format, kernel: Kernel, device: str):
    for upper in (4, 16, 24, 96):
        dtype = torch.float16
        packed, x = a_weight_for(kernel, chosen, device, dtype, upper)
        product = kernel.prepare(problem_of(x, packed))
        for m in {upper, upper - 1, upper // 2 + upper // 4 + 1}:
            assert bucket_of(m) == upper
            check_product(product(x[:m], packed, None), x[:m], packed, None)


@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_product_with_another_dtype_than_the_weights(chosen: Format, kernel: Kernel, device: str):
    for dtype, weight_dtype, m in pairwise(WEIGHT_DTYPES, WEIGHT_DTYPES, (2, 65)):
        packed = packed_weight(chosen.name, cases_of(chosen.name)[0], weight_dtype, device)
        x, bias = operands(packed, m, dtype)
        if refused(kernel, x, packed) is None:
            check_product(linear(x, packed, bias, kernel.name), x, packed, bias)


@pytest.mark.parametrize(("m", "bad"), [(3, float("nan")), (40, float("inf"))])
@pytest.mark.parametrize(("chosen", "kernel", "device"), params(*KERNELS))
def test_a_token_that_is_not_finite_is_seen_and_spoils_no_other(
    chosen: Format, kernel: Kernel, device: str, bad: float, m: int
):
    packed, x = a_weight_for(kernel, chosen, device, torch.float16, m)
    expected = run(kernel, x, packed)
    x[1] = bad
    y = run(kernel, x, packed)
    others = torch.arange(m, device=device) != 1
    assert torch.equal(y[others], expected[others])
    assert not y[1, packed.unpack().any(1)].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chosen", FORMATS)
def test_product_of_no_tokens_and_of_more_dimensions(chosen: Format, device: str):
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16, device)
    n, k = packed.shape
    for shape in ((0, k), (2, 0, k), (k,), (2, 3, k)):
        x = torch.randn(shape, device=device).half()
        y = linear(x, packed)
        assert y.shape == (*shape[:-1], n)
        if x.numel():
            check_product(y.reshape(-1, n), x.reshape(-1, k), packed, None)


@pytest.mark.parametrize("chosen", FORMATS)
def test_a_traced_product_is_the_eager_one_of_any_spec(chosen: Format):
    """The traced operator gets the spec as text, made from the fields: a changed field changes both ways alike."""
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16)
    n, k = packed.shape
    x = torch.randn(2, k).half()
    for spec in (packed.spec, replace(packed.spec, dtype=torch.float16, shape=(n, k))):
        same = Packed(spec, packed.tensors)
        tensors = [same.tensors[name] for name in sorted(same.tensors)]
        assert torch.equal(torch.ops.semisparse.linear(x, tensors, None, spec.json, "auto"), linear(x, same))
    cut = replace(packed.spec, shape=(n - 1, k))
    assert WeightSpec.from_json(cut.json).shape == (n - 1, k)
    assert cut != packed.spec


@pytest.mark.parametrize("chosen", FORMATS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_weight_is_stored_and_multiplied(chosen: Format, data):
    """Any shape, pattern, share of further zeros, dtype and number of tokens."""
    pattern = data.draw(st.sampled_from(accepted_patterns(chosen.name)))
    dtype = data.draw(st.sampled_from(WEIGHT_DTYPES))
    n, k, m = (data.draw(st.integers(1, most)) for most in (90, 300, 70))
    seed, zeros = data.draw(st.integers(0, 999)), data.draw(st.sampled_from((0.0, 0.3, 0.95)))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * (torch.rand(n, k, generator=generator) >= zeros)
    parsed = parse_pattern(pattern)
    weight = (weight * parsed.mask(weight.abs())).to(dtype)
    if parsed.violation(weight != 0):
        return
    packed = chosen.pack(weight, pattern)
    chosen.validate(packed)
    check_stored(packed, weight, pattern)
    for device in DEVICES:
        there = packed.to(device)
        x, bias = operands(there, m, dtype, seed)
        check_product(linear(x, there, bias), x, there, bias)


@pytest.mark.parametrize("chosen", FORMATS)
def test_a_kernel_that_cannot_run_says_why(chosen: Format):
    packed = packed_weight(chosen.name, cases_of(chosen.name)[0], torch.float16)
    x = torch.zeros(1, packed.shape[1], dtype=torch.float16)
    for kernel in chosen.kernels:
        reason = refused(kernel, x, packed)
        if reason:
            with pytest.raises(KernelError, match=re.escape(f"{kernel.name}: {reason}")):
                linear(x, packed, kernel=kernel.name)
    with pytest.raises(InputError, match="has no kernel 'abacus'; it has auto, "):
        linear(x, packed, kernel="abacus")
    with pytest.raises(InputError, match="features"):
        linear(x[:, :-1], packed)
    with pytest.raises(InputError, match="features"):
        linear(torch.tensor(1.0), packed)
    with pytest.raises(InputError, match="bias"):
        linear(x, packed, torch.zeros(packed.shape[0] + 1))
    with pytest.raises(InputError, match="x is on meta"):
        linear(x.to("meta"), packed)
    with pytest.raises(InputError, match="the bias is on meta"):
        linear(x, packed, torch.zeros(packed.shape[0], device="meta"))
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float64):
        with pytest.raises(InputError, match=str(dtype)):
            linear(x.to(dtype), packed)


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
    for pattern in accepted_patterns(chosen.name):
        if parse_pattern(pattern).density < 1:
            with pytest.raises(PatternError, match=r"row \d+"):
                chosen.pack(torch.ones(64, 256), pattern)


def refuses(chosen: Format, packed: Packed) -> bool:
    try:
        chosen.validate(packed)
    except FormatError:
        return True
    return False


def corruptions(packed: Packed):
    """Return what is wrong, and the packed weight with it: each must be refused."""
    n, k = packed.shape
    spec = packed.spec
    for name, tensor in packed.tensors.items():
        others = {other: t for other, t in packed.tensors.items() if other != name}
        yield f"{name} missing", Packed(spec, others)
        yield f"{name} of another dtype", Packed(spec, {**others, name: tensor.to(torch.float64)})
        yield f"{name} of another rank", Packed(spec, {**others, name: tensor[None]})
        for dim in range(tensor.dim()):
            if tensor.shape[dim]:
                shorter = tensor.narrow(dim, 0, tensor.shape[dim] - 1)
                yield f"{name} truncated along {dim}", Packed(spec, {**others, name: shorter})
    yield "a tensor too many", Packed(spec, {**packed.tensors, "more": torch.zeros(1)})
    for shape in ((n + 1, k), (n - 1, k), (n, k + 256), (n, 0), (-n, k), (n, -k)):
        yield f"shape {shape}", Packed(replace(spec, shape=shape), packed.tensors)
    for version in (spec.version + 1, 0):
        yield f"version {version}", Packed(replace(spec, version=version), packed.tensors)
    for key, value in spec.params.items():
        yield f"{key} missing", Packed(replace(spec, params=spec.params.without(key)), packed.tensors)
        numbers = (value + 1, -1, 1 << 80) if isinstance(value, int) else ()
        for wrong in ("nonsense", float("inf"), *numbers):
            yield f"{key} = {wrong}", Packed(replace(spec, params={**spec.params, key: wrong}), packed.tensors)


@pytest.mark.parametrize(("chosen", "case", "dtype"), params(*CASES[::2]))
def test_corrupted_weights_are_refused(chosen: Format, case: Case, dtype: torch.dtype):
    for what, corrupted in corruptions(packed_weight(chosen.name, case, dtype)):
        assert refuses(chosen, corrupted), what


@pytest.mark.parametrize(("chosen", "case", "dtype"), params(*CASES[1::2]))
def test_wild_integers_are_refused_or_harmless(chosen: Format, case: Case, dtype: torch.dtype):
    """A number out of range is refused; with any that `validate` accepts, all kernels must compute the same."""
    packed = packed_weight(chosen.name, case, dtype)
    generator = torch.Generator().manual_seed(0)
    x, bias = operands(packed, 2, dtype)
    for name, tensor in packed.tensors.items():
        if tensor.is_floating_point() or not tensor.numel():
            continue
        limits = torch.iinfo(tensor.dtype)
        for wild in (limits.min, limits.max, -1 if limits.min else 1, *_random_integers(limits, generator)):
            corrupted = tensor.clone()
            corrupted.view(-1)[torch.randint(tensor.numel(), (), generator=generator)] = wild
            changed = Packed(packed.spec, {**packed.tensors, name: corrupted})
            for kernel in () if refuses(chosen, changed) else chosen.all_kernels:
                if refused(kernel, x, changed) is None:
                    check_product(linear(x, changed, bias, kernel.name), x, changed, bias)


def _random_integers(limits: torch.iinfo, generator: torch.Generator) -> list[int]:
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
    return torch.randint(low, high, (10,), generator=generator).tolist()
