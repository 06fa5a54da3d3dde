"""Layers packed by GPTQModel itself, read as GPTQModel dequantises them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from semisparse.integrations.importers import METHODS, Rounded
from tests.foreign import rounded_to_groups

N, K, SIZE = 64, 96, 32


@pytest.fixture(autouse=True, scope="module")
def _installed():
    pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="GPTQModel is not installed")


def rounded(bits: int, order: bool = False) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Return a linear layer on a grid, its scales and zero points [N, groups], and the group of each column."""
    torch.manual_seed(0)
    groups = torch.arange(K) // SIZE
    if order:
        groups = groups[torch.randperm(K)]
    codes, scale, zero = rounded_to_groups(torch.randn(N, K), bits, groups)
    zero[::5] = 0  # GPTQModel subtracts 1 from these, too
    layer = nn.Linear(K, N, bias=False, dtype=torch.float16)
    layer.weight.data = ((codes - zero[:, groups]).float() * scale.float()[:, groups]).half()
    return layer, scale, zero, groups.int()


def read(method: str, tensors: dict[str, Tensor], block: dict[str, Any]) -> Tensor:
    reader = METHODS[method]
    assert reader.measure(tensors, block) == (N, K)
    weight = reader.read(tensors, block)
    assert isinstance(weight, Rounded)
    return weight.dequantised()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "order"), [(2, False), (3, False), (4, False), (4, True), (8, False)])
def test_gptq(bits: int, order: bool, version: str):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    layer, scale, zero, groups = rounded(bits, order)
    settings = {"bits": bits, "group_size": SIZE, "sym": False, "desc_act": order}
    packed = TorchLinear(in_features=K, out_features=N, **settings)
    packed.pack_original(layer, scale, zero, groups)
    packed.post_init()
    expected = packed.dequantize_weight().T
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(**settings))
    block = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "format": version}
    found = read("gptq", {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales", "g_idx")}, block)
    assert torch.equal(found.half(), expected)
    assert torch.equal(found.half(), layer.weight)


def test_awq():
    from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    layer, scale, zero, groups = rounded(4)
    settings = {"bits": 4, "group_size": SIZE, "sym": False, "desc_act": False}
    packed = AwqTorchLinear(in_features=K, out_features=N, **settings)
    AwqGEMMLinear.pack(packed, layer, scale, zero, groups)  # the class itself refuses a machine without CUDA
    tensors = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    expected = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, SIZE).T
    found = read("awq", tensors, {"quant_method": "awq", "bits": 4, "group_size": SIZE, "format": "gemm"})
    assert torch.equal(found.half(), expected)
    assert torch.equal(found.half(), layer.weight)
