"""Invalid operands give one sentence and no crash. And `torch.vmap`, whose tensors have no data of their own."""

import re
import warnings

import pytest
import torch

import semisparse
from semisparse.errors import FormatError, InputError, PatternError
from semisparse.formats import Packed, get_format, linear, product
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern

WEIGHT = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
WEIGHT = WEIGHT * parse_pattern("2:4").mask(WEIGHT.abs())
PACKED = get_format("bitmask").pack(WEIGHT, "2:4")
X = torch.randn(2, 64)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        ([1.0], None, "operands are list"),
        (X, [0.0] * 8, "list"),
        (X.to_sparse(), None, "sparse_coo, expected a strided"),
        (X.int(), None, "x is torch.int32"),
        (X.bool(), None, "x is torch.bool"),
        (X.to(torch.complex64), None, "x is torch.complex64"),
        (torch.tensor(1.0), None, r"x is \[\]"),
        (X.to("meta"), None, "x is on meta"),
        (X, torch.zeros(8, device="meta"), "bias is on meta"),
        (X, torch.zeros(8, dtype=torch.int32), "bias is torch.int32"),
    ],
)
def test_operands_that_are_none_are_refused(x, bias, message: str):
    with pytest.raises(InputError, match=message):
        linear(x, PACKED, bias)


def test_a_weight_on_two_devices_is_refused():
    tensors = {name: tensor.to("meta") if name == "values" else tensor for name, tensor in PACKED.tensors.items()}
    with pytest.raises(FormatError, match="several devices"):
        Packed(PACKED.spec, tensors)


@pytest.mark.parametrize("missing", PACKED.tensors)
def test_a_weight_that_lacks_a_tensor_is_refused(missing: str):
    """The C++ kernel would read from address 0."""
    rest = Packed(PACKED.spec, {name: tensor for name, tensor in PACKED.tensors.items() if name != missing})
    for use in (lambda: linear(X, rest), rest.unpack):
        with pytest.raises(FormatError, match=r"stores \['masks', 'values'\], got"):
            use()


@pytest.mark.parametrize("changed", [torch.Tensor.double, torch.Tensor.flatten, lambda values: values[:1]])
def test_a_tensor_of_another_dtype_or_shape_is_refused(changed):
    """The C++ kernel would read past its end, or floats as codes."""
    other = Packed(PACKED.spec, {**PACKED.tensors, "values": changed(PACKED.tensors["values"])})
    for use in (lambda: linear(X, other), other.unpack):
        with pytest.raises(FormatError, match=r"tensor values is .*, expected torch\.float32"):
            use()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage is empty, as FSDP leaves a parameter between two uses."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize("name", ["bitmask", "dense"])
@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_a_tensor_without_memory_is_refused(name: str, which: str):
    packed, bias = get_format(name).pack(WEIGHT, "2:4"), torch.ones(8)
    tensors = {key: freed(tensor) if which == "weight" else tensor for key, tensor in packed.tensors.items()}
    with pytest.raises(InputError, match="was freed: gather or load it"):
        linear(freed(X) if which == "x" else X, Packed(packed.spec, tensors), freed(bias) if which == "bias" else bias)


def test_a_tensor_of_zeros_without_memory_is_multiplied():
    """torch differentiates forward with such tangents."""
    assert torch.equal(linear(torch._efficientzerotensor(X.shape), PACKED), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [[[1.0]], X[0], X[:0], X[None], X.to("meta"), X.to_sparse()])
def test_weights_that_no_format_can_be_chosen_for_are_refused(weight):
    with pytest.raises(FormatError, match="a weight is"):
        semisparse.pack(weight, format="auto", pattern="2:4")


@pytest.mark.parametrize(
    ("weight", "pattern", "options", "message"),
    [
        ([[1.0]], "2:4", {}, "got list"),
        (WEIGHT.to("meta"), "2:4", {}, "meta device"),
        (WEIGHT.to_sparse(), "2:4", {}, "sparse_coo"),
        (WEIGHT, None, {}, "unknown pattern None"),
        (WEIGHT, "2:4", {"bits": 3}, "no pack option bits; it has kind, scales"),
    ],
)
def test_weights_that_are_none_are_refused(weight, pattern, options: dict, message: str):
    with pytest.raises((FormatError, PatternError), match=message):
        get_format("bitmask").pack(weight, pattern, **options)


def test_vmap_over_x_and_bias():
    x, bias = torch.randn(3, 2, 64), torch.randn(3, 8)
    expected = torch.stack([linear(rows, PACKED, b) for rows, b in zip(x, bias, strict=True)])
    torch.testing.assert_close(torch.vmap(lambda r, b: linear(r, PACKED, b))(x, bias), expected, rtol=1e-6, atol=1e-6)
    found = torch.vmap(lambda r: linear(r, PACKED), in_dims=1)(x.transpose(0, 1))
    torch.testing.assert_close(found, torch.stack([linear(rows, PACKED) for rows in x]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "pattern", "damaged"),
    [("ec_csr", "50%", "deltas"), ("gqs", "g16@50%", "starts"), ("vector_nm", "2:4v1", "positions")],
)
def test_a_state_dict_is_checked_before_it_is_taken(name: str, pattern: str, damaged: str):
    weight = WEIGHT * parse_pattern(pattern).mask(WEIGHT.abs())
    layer = SparseLinear(get_format(name).pack(weight, pattern))
    before, state = layer(X), layer.state_dict()
    with pytest.raises(FormatError, match=damaged):
        layer.load_state_dict({**state, damaged: torch.full_like(state[damaged], 100)})
    assert torch.equal(layer(X), before)
    layer.load_state_dict(state)
    assert torch.equal(layer(X), before)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("bitmask", "2:4"),
        ("dense", "0%"),
        ("ec_csr", "50%"),
        ("gqs", "g16@50%"),
        ("slide24", "2:4"),
        ("vector_nm", "2:4v1"),
    ],
)
def test_a_weight_whose_values_want_gradients_is_multiplied(name: str, pattern: str):
    """As in a model of which every parameter in floating point was unfrozen."""
    layer = SparseLinear(get_format(name).pack(WEIGHT * parse_pattern(pattern).mask(WEIGHT.abs()), pattern))
    before = layer(X)
    for parameter in layer.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    torch.testing.assert_close(layer(X).detach(), before)


def test_an_assigned_tensor_keeps_its_dtype_and_is_refused():
    """`load_state_dict` casts what it copies, not what it assigns."""
    layer = SparseLinear(PACKED)
    before, state = layer(X), layer.state_dict()
    other = {**state, "values": state["values"].double()}
    layer.load_state_dict(other)
    assert torch.equal(layer(X), before)
    with pytest.raises(FormatError, match=r"tensor values is torch\.float64"):
        layer.load_state_dict(other, assign=True)
    assert torch.equal(layer(X), before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_memory_that_was_never_written_is_not_computed_with(assign: bool, compiled: bool):
    """`to_empty` allocates; a kernel would follow whatever indices are there."""
    layer = SparseLinear(PACKED)
    before, state = layer(X), layer.state_dict()
    empty = SparseLinear(PACKED).to("meta").to_empty(device="cpu")
    forward = torch.compile(empty, backend="eager") if compiled else empty
    for parameter in empty.parameters():
        parameter.fill_(1)  # allocated memory may happen to be valid
    with pytest.raises(FormatError, match="tensor"):
        forward(X)
    empty.load_state_dict(state, assign=assign)
    assert torch.equal(forward(X), before)
    assert not empty._unfilled


def test_a_kernel_that_needs_no_compiler_is_announced_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("semisparse.runtime.cpp.refusal", lambda: "no C++ compiler found")
    product._prepared.cache_clear()
    product._say_slow.cache_clear()
    with pytest.warns(UserWarning, match="gqs runs its slow unpack_cpu kernel.*no C.. compiler found"):
        linear(torch.randn(1, 32), semisparse.pack(torch.randn(16, 32), format="gqs", pattern="g16@0%"))
    product._prepared.cache_clear()


def test_the_slow_reference_kernel_is_announced_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("semisparse.runtime.cpp.refusal", lambda: "no C++ compiler found")
    product._prepared.cache_clear()
    product._say_slow.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        linear(X, PACKED)
        linear(X[:1], PACKED)
    (message,) = (str(warning.message) for warning in warned)
    assert re.search("bitmask runs its slow reference kernel.*no C.. compiler found", message)
    product._prepared.cache_clear()


@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_gives_its_dtype_as_a_dense_layer_does(inside: torch.dtype, weight: torch.dtype, dtype: torch.dtype):
    """A model mixes dtypes otherwise, which torch's own operators refuse."""
    packed, x = get_format("bitmask").pack(WEIGHT.to(weight), "2:4"), X.to(dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", inside):
        y = linear(x, packed)
        expected = torch.nn.functional.linear(x, WEIGHT.to(weight))
    assert y.dtype == expected.dtype == inside
    # Relative to the sum of magnitudes: x and w are rounded to 16 bits, perhaps once more inside, and so is the result.
    bound = 5 * 2.0**-8 * (X.abs() @ WEIGHT.abs().T)
    assert ((y.float() - X @ WEIGHT.T).abs() <= bound).all()
    y.float().sum().backward()
    assert ((x.grad.float() - WEIGHT.sum(0)).abs() <= 3 * 2.0**-8 * WEIGHT.abs().sum(0)).all()
    assert linear(x, packed).dtype == dtype
