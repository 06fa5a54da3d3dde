"""A layer in the layout of a GPU computes, saves, loads and moves as one in the layout on disk."""

import copy

import pytest
import torch
from torch import nn

from semisparse.errors import FormatError
from semisparse.formats import get_format
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern

BITMASK = get_format("bitmask")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def packed(n=40, k=300, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return BITMASK.pack(weight * parse_pattern("32:64").mask(torch.rand(n, k, generator=generator)), "32:64")


def in_tiles(layer: SparseLinear) -> SparseLinear:
    """Convert a layer on the CPU to the layout of a GPU."""
    layer.arrange("cuda")
    assert set(dict(layer.named_parameters())) == {"tiles", "bias"}
    return layer


def test_state_dict_is_the_layout_on_disk():
    layer = SparseLinear(packed(), torch.ones(40).half())
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for _ in ("in tiles", "back in rows"):
        in_tiles(layer) if not layer.packed.params else layer.arrange()
        assert before.keys() == layer.state_dict().keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert layer.packed.params == {}


def test_loading_a_state_dict_takes_the_layout_on_disk():
    first, second = SparseLinear(packed(seed=1), torch.ones(40).half()), SparseLinear(packed(), torch.zeros(40).half())
    result = in_tiles(second).load_state_dict(first.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(second.weight, first.weight)
    assert torch.equal(second.bias, first.bias)


def test_a_layer_in_tiles_computes_and_casts_like_one_in_rows():
    layer = SparseLinear(packed(), torch.ones(40).half())
    x = torch.randn(3, 300).half()
    # Both multiply in float32 and round once; sums of 300 terms in another order differ in the last bit of float16.
    torch.testing.assert_close(in_tiles(copy.deepcopy(layer))(x), layer(x), rtol=2**-9, atol=2**-9)
    assert torch.equal(in_tiles(copy.deepcopy(layer)).double().weight, layer.weight)


@needs_gpu
def test_a_layer_on_a_gpu_saves_and_returns_what_it_was():
    layer = SparseLinear(packed(), torch.ones(40).half())
    stored = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    model = nn.Sequential(layer).cuda()
    assert layer.packed.params == {"layout": "tiles"}
    assert {f"0.{name}" for name in stored} == model.state_dict().keys()
    assert all(torch.equal(stored[name], model.state_dict()[f"0.{name}"].cpu()) for name in stored)
    model.load_state_dict({f"0.{name}": tensor for name, tensor in stored.items()})
    assert layer.packed.params == {"layout": "tiles"}
    model.cpu()
    assert layer.packed.params == {}
    assert all(torch.equal(stored[name], tensor) for name, tensor in layer.state_dict().items())


@needs_gpu
def test_a_refused_state_dict_leaves_a_layer_as_it_was():
    model = nn.Sequential(SparseLinear(packed())).cuda()
    broken = {name: torch.full_like(tensor, -1) for name, tensor in model.state_dict().items()}
    with pytest.raises(FormatError):
        model.load_state_dict(broken)
    assert model[0].packed.params == {"layout": "tiles"}


@needs_gpu
def test_a_checkpoint_loaded_to_a_gpu_computes_from_tiles_and_saves_the_same_bytes(tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.integrations.test_transformers import compressed, save
    from tests.models import random_model

    first = save(compressed(random_model("llama").half()), tmp_path / "first")
    for name, load in {
        "placed": lambda: AutoModelForCausalLM.from_pretrained(first, dtype="auto", device_map="cuda"),
        "moved": lambda: AutoModelForCausalLM.from_pretrained(first, dtype="auto").cuda(),
    }.items():
        model = load()
        assert {layer.packed.params.get("layout") for layer in sparse_layers(model).values()} == {"tiles"}
        again = save(model, tmp_path / name)
        for path in first.iterdir():
            assert path.read_bytes() == (again / path.name).read_bytes(), (name, path.name)
