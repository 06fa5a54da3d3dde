"""Packed weights that are loaded to a device, checked there and arranged once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from semisparse.checkpoint import load_model, placed_on
from semisparse.errors import CheckpointError
from semisparse.formats import get_format
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import SparseLinear, join_layers
from tests.serving import Served, every_format, write

ONE_OF_EACH = {served.format: served for served in every_format()}
CPU = torch.device("cpu")
IDS = torch.arange(1, 15).view(2, 7)


@pytest.fixture
def arranged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the device of every layer with tensors that is arranged."""
    devices: list[str] = []
    arrange = SparseLinear.arrange

    def recorded(layer: SparseLinear, device_type: str | None = None) -> None:
        if layer.packed.device.type != "meta":
            devices.append(layer.packed.device.type)
        arrange(layer, device_type)

    monkeypatch.setattr(SparseLinear, "arrange", recorded)
    return devices


def test_layers_are_arranged_after_they_are_joined(arranged: list[str], tmp_path: Path):
    directory = write(ONE_OF_EACH["ec_csr"], tmp_path / "model")
    arranged.clear()
    expected = AutoModelForCausalLM.from_pretrained(directory)
    assert len(arranged) == len(sparse_layers(expected))
    arranged.clear()
    with placed_on(CPU):
        model = AutoModelForCausalLM.from_pretrained(directory)
    assert not arranged
    joined = join_layers(model)
    assert joined
    assert len(arranged) == len(joined)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_weights_are_checked_where_they_are_placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    directory = write(ONE_OF_EACH["ec_csr"], tmp_path / "model")
    monkeypatch.setattr(SparseLinear, "place", lambda layer, device: placed.append(device))
    placed: list[torch.device] = []
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("panel_loads"))
    tensors[name][-1] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="panel_loads runs from"), placed_on(CPU):
        AutoModelForCausalLM.from_pretrained(directory)
    assert placed[0] == CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="loads to a GPU: no GPU here")
@pytest.mark.parametrize("served", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_on_a_gpu_the_same_weights_are_joined(served: Served, arranged: list[str], tmp_path: Path):
    directory = write(served, tmp_path / served.folder)
    expected = load_model(directory, "cuda")
    join_layers(expected)
    arranged.clear()
    model = load_model(directory, "cuda", join=join_layers)
    assert set(arranged) == {"cuda"}
    layers, others = sparse_layers(model), sparse_layers(expected)
    assert layers.keys() == others.keys()
    for name, layer in layers.items():
        packed = layer.packed
        assert get_format(packed.spec.format).arrange(packed, "cuda") is packed, name
        assert packed.spec == others[name].packed.spec
        for tensor, other in zip(packed.tensors.values(), others[name].packed.tensors.values(), strict=True):
            assert torch.equal(tensor, other), name
    ids = IDS.cuda()
    assert torch.equal(model(ids).logits, expected(ids).logits)
