"""A kernel is chosen and prepared once per problem; nothing that changes between calls is cached."""

import copy
import io
import threading
from collections import Counter

import pytest
import torch

from semisparse.errors import KernelError
from semisparse.formats import Format, Kernel, Packed, get_format, linear, product
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern

BITMASK = get_format("bitmask")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count how often a format is asked for a kernel, and a kernel for its product."""
    product._prepared.cache_clear()
    found: Counter = Counter()
    choose = Format.choose

    def counting(form: Format, problem, kernel="auto") -> Kernel:
        found["choose"] += 1
        chosen = choose(form, problem, kernel)

        def prepare(problem):
            found["prepare"] += 1
            return chosen.prepare(problem)

        return Kernel(chosen.name, chosen.device, chosen.supports, prepare)

    monkeypatch.setattr(Format, "choose", counting)
    return found


def packed_weight(seed: int = 0, dtype: torch.dtype = torch.float32, pattern: str = "32:64"):
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))
    return BITMASK.pack((weight * parse_pattern(pattern).mask(weight.abs())).to(dtype), pattern)


def test_the_second_call_of_a_size_asks_nothing(asked):
    layer, x = SparseLinear(packed_weight()), torch.randn(3, 128)
    for _ in range(3):
        layer(x)
        layer(x.view(1, 3, 128))
    assert asked == {"choose": 1, "prepare": 1}


def test_layers_that_are_declared_alike_share_what_was_prepared(asked):
    x = torch.randn(3, 128)
    one, other = SparseLinear(packed_weight(0)), SparseLinear(packed_weight(1))
    assert torch.equal(one(x), linear(x, packed_weight(0)))
    assert torch.equal(other(x), linear(x, packed_weight(1)))
    assert not torch.equal(one(x), other(x))
    assert asked["prepare"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: layer(x[:2]),
        lambda layer, x: layer(x.half()),
        lambda layer, x: linear(x, layer.packed, kernel="reference"),
        lambda layer, x: SparseLinear(packed_weight(pattern="16:64"))(x),
    ],
    ids=["tokens", "dtype", "kernel", "pattern"],
)
def test_another_problem_is_asked_for(asked, change):
    layer, x = SparseLinear(packed_weight()), torch.randn(3, 128)
    layer(x)
    change(layer, x)
    assert asked == {"choose": 2, "prepare": 2}


def test_a_layer_in_another_layout_is_asked_for_anew(asked):
    """Moving a layer to a GPU and back changes its layout."""
    layer, x = SparseLinear(packed_weight(dtype=torch.float16)), torch.randn(3, 128).half()
    expected = layer(x)
    layer.arrange("cuda")
    assert "tiles" in dict(layer.named_parameters())
    torch.testing.assert_close(layer(x), expected, rtol=2**-9, atol=2**-9)  # another kernel: sums in another order
    layer.arrange("cpu")
    assert torch.equal(layer(x), expected)
    assert asked == {"choose": 2, "prepare": 2}


def test_new_tensors_under_the_same_declaration_are_what_is_multiplied(asked):
    layer, other, x = SparseLinear(packed_weight(0)), packed_weight(1), torch.randn(3, 128)
    layer(x)
    layer.load_state_dict(SparseLinear(other).state_dict())
    assert torch.equal(layer(x), linear(x, other))
    for name, tensor in packed_weight(2).tensors.items():  # as loaders assign them
        layer._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
    assert torch.equal(layer(x), linear(x, packed_weight(2)))
    layer.packed = Packed(other.spec, other.tensors)
    assert torch.equal(layer(x), linear(x, other))
    assert asked["prepare"] == 1


def test_copies_and_pickles_compute_and_save_the_same(asked):
    layer, x = SparseLinear(packed_weight(), torch.ones(24)), torch.randn(3, 128)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(again(x), expected)
        assert again.state_dict().keys() == {"masks", "values", "bias"}
        for name, parameter in again.named_parameters():
            assert parameter.data_ptr() != dict(layer.named_parameters())[name].data_ptr()


def test_threads_compute_as_one_does(asked):
    layer = SparseLinear(packed_weight())
    inputs = [torch.randn(m, 128) for m in (1, 2, 3, 4)]
    found: list = [None] * len(inputs)

    def compute(i: int) -> None:
        for _ in range(20):
            found[i] = layer(inputs[i])

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, layer(x)) for x, y in zip(inputs, found, strict=True))


def test_a_refusal_is_not_remembered_as_an_answer():
    packed = packed_weight()
    for _ in range(2):
        with pytest.raises(KernelError, match="decode: runs on cuda, the operands are on cpu"):
            linear(torch.zeros(1, 128), packed, kernel="decode")
