"""SparseLinear against the dense layer it replaces."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError
from semisparse.formats import get_format
from semisparse.nn import SparseLinear, is_linear, replace_linear, weight_of
from semisparse.patterns import parse_pattern


def pruned(module: nn.Module, pattern: str = "32:64") -> nn.Module:
    weight = weight_of(module)
    weight.mul_(parse_pattern(pattern).mask(weight.abs().float()))
    return module


def test_conv1d_counts_as_linear_with_its_weight_transposed():
    module = Conv1D(12, 20)
    assert is_linear(module)
    assert weight_of(module).shape == (12, 20)
    weight_of(module)[3, 5] = 7
    assert module.weight[5, 3] == 7


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(70, 13), lambda: nn.Linear(70, 13, bias=False), lambda: Conv1D(13, 70)]
)
def test_a_replaced_layer_computes_the_same(make):
    torch.manual_seed(0)
    model = nn.Sequential(pruned(make()))
    if getattr(model[0], "bias", None) is not None:
        nn.init.normal_(model[0].bias)
    x = torch.randn(2, 3, 70)
    expected = model(x)
    replace_linear(model, "0", get_format("bitmask").pack(weight_of(model[0]), "32:64"))
    # Two float32 sums of 70 terms in different orders differ by at most about 70 roundings of terms below 4.
    torch.testing.assert_close(model(x), expected, rtol=0, atol=70 * 4 * 2**-24)


def test_only_a_linear_layer_of_the_right_shape_is_replaced():
    packed = get_format("bitmask").pack(weight_of(pruned(nn.Linear(64, 8))), "32:64")
    with pytest.raises(InputError, match="expected a linear layer, got ReLU"):
        replace_linear(nn.Sequential(nn.ReLU()), "0", packed)
    with pytest.raises(InputError, match="no layer 'missing'"):
        replace_linear(nn.Sequential(nn.Linear(64, 8)), "missing", packed)
    with pytest.raises(InputError, match=r"N, K = \(9, 64\)"):
        replace_linear(nn.Sequential(nn.Linear(64, 9)), "0", packed)


def test_casting_the_model_leaves_the_packed_tensors_alone():
    packed = get_format("bitmask").pack(weight_of(pruned(nn.Linear(64, 8))).to(torch.bfloat16), "32:64")
    layer = SparseLinear(packed, torch.zeros(8))
    before = copy.deepcopy(layer.state_dict())
    layer.half().double()
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_repr_names_format_pattern_and_kernel():
    layer = SparseLinear(get_format("bitmask").pack(weight_of(pruned(nn.Linear(64, 8))), "32:64"))
    shown = repr(layer)
    for part in ("format=bitmask", "pattern=32:64", "bits_per_weight=17.00", "kernel="):
        assert part in shown


def test_an_impossible_kernel_is_refused_with_reasons():
    packed = get_format("bitmask").pack(weight_of(pruned(nn.Linear(64, 8))), "32:64")
    with pytest.raises(InputError, match="no kernel 'nonsense'; it has auto,"):
        SparseLinear(packed, kernel="nonsense")(torch.zeros(1, 64))
    with pytest.raises(InputError, match=r"expected \[\.\.\., 64\] features: the weight takes K = 64"):
        SparseLinear(packed)(torch.zeros(1, 63))


def test_weight_is_a_dense_copy():
    dense = pruned(nn.Linear(70, 13))
    layer = SparseLinear(get_format("bitmask").pack(weight_of(dense), "32:64"))
    assert torch.equal(layer.weight, weight_of(dense))
    layer.weight.zero_()
    assert torch.equal(layer.weight, weight_of(dense))
