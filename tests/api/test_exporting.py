"""Compressed models for tools without semisparse, and dense models from packed layers in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.api import compress, export, load
from semisparse.errors import InputError
from semisparse.integrations.importers import load_dequantised
from semisparse.nn import SparseLinear, join_layers
from tests import foreign
from tests.models import byte_tokenizer, random_model

PLAIN = ["prune=magnitude", "search=none", "tune=none"]


def compressed(tmp_path: Path, architecture: str, recipe: str, *settings: str) -> Path:
    random_model(architecture).save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    compress(tmp_path / "dense", recipe=recipe, settings=[*PLAIN, *settings], out=tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("architecture", "recipe", "settings"),
    [("llama-bias", "ec-spmv", ()), ("gpt2", "slidesparse", ("quant=int8",)), ("llama-tied", "gqsa", ())],
)
def test_dense_in_a_directory_and_in_memory(tmp_path: Path, architecture: str, recipe: str, settings: tuple[str, ...]):
    small = compressed(tmp_path, architecture, recipe, *settings)
    report = export(small, "dense", tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    packed = load(small)
    join_layers(packed)
    assert not hasattr(plain.config, "quantization_config")
    assert (tmp_path / "plain" / "tokenizer.json").is_file()
    weights = {n: m.weight for n, m in load(small).named_modules() if isinstance(m, SparseLinear)}
    assert sorted(weights) == report["dense_layers"]
    for name, weight in weights.items():
        found = plain.get_submodule(name).weight
        assert torch.equal(found if isinstance(plain.get_submodule(name), nn.Linear) else found.T, weight)
    ids = torch.arange(12)[None]
    assert torch.equal(packed.dequantize(torch.bfloat16)(ids).logits, plain(ids).logits)
    assert not any(isinstance(module, SparseLinear) for module in packed.modules())


@pytest.mark.parametrize(("kind", "layout"), [("int8", "int-quantized"), ("fp8", "float-quantized")])
def test_compressed_tensors_come_back(tmp_path: Path, kind: str, layout: str):
    small = compressed(tmp_path, "llama-bias", "slidesparse", f"quant={kind}")
    report = export(small, "compressed-tensors", tmp_path / "theirs")
    assert report["dense_layers"] == []
    block = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    assert (block["quant_method"], block["format"]) == ("compressed-tensors", layout)
    read, _ = load_dequantised(tmp_path / "theirs")
    for name, layer in load(small).named_modules():
        if isinstance(layer, SparseLinear):
            torch.testing.assert_close(read.get_submodule(name).weight, layer.weight.to(read.dtype), rtol=2**-8, atol=0)
            assert torch.equal(read.get_submodule(name).weight == 0, layer.weight == 0)


def read_by_the_package(path: Path) -> PreTrainedModel:
    """Return a directory as transformers dequantises it with the package compressed-tensors."""
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from transformers import CompressedTensorsConfig

    return AutoModelForCausalLM.from_pretrained(path, quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize(
    ("recipe", "settings", "layout", "bits"),
    [
        ("slidesparse", ("quant=int8",), "int-quantized", 8),
        pytest.param("slidesparse", ("quant=fp8",), "float-quantized", 8, marks=pytest.mark.slow),
        ("gqsa", (), "pack-quantized", 8),
        pytest.param("gqsa", ("quant=w8",), "pack-quantized", 8, marks=pytest.mark.slow),
        ("dense-w2", ("pattern=g32@0%",), "pack-quantized", 8),
        ("gqsa", ("quant=w4a8",), "int-quantized", 8),
    ],
)
def test_the_package_reads_the_same_weights(
    tmp_path: Path, recipe: str, settings: tuple[str, ...], layout: str, bits: int
):
    """Zero points of our own packers are fractions of a code, so their codes are written in 8 bits."""
    small = compressed(tmp_path, "llama-bias", recipe, *settings)
    report = export(small, "compressed-tensors", tmp_path / "theirs")
    block = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    assert block["format"] == layout
    assert {group["weights"]["num_bits"] for group in block["config_groups"].values()} == {bits}
    assert block["ignore"] == ["lm_head"]
    theirs, ours = read_by_the_package(tmp_path / "theirs"), load(small)
    packed = {n: m for n, m in ours.named_modules() if isinstance(m, SparseLinear)}
    assert packed
    assert bool(report["widened_layers"]) == (recipe != "slidesparse" and "quant=w8" not in settings)
    for name, layer in packed.items():
        assert torch.equal(theirs.get_submodule(name).weight, layer.weight), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(ours.dequantize(torch.bfloat16)(ids).logits, theirs(ids).logits)


GROUPS = {"num_bits": 4, "group_size": 32, "strategy": "group"}


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        pytest.param(GROUPS | {"symmetric": True}, None, marks=pytest.mark.slow),
        (GROUPS | {"symmetric": False}, None),
        pytest.param(
            {"num_bits": 8, "group_size": 16, "strategy": "group", "symmetric": False}, None, marks=pytest.mark.slow
        ),
        ({"num_bits": 3, "group_size": 32, "strategy": "group", "symmetric": False}, None),
        (GROUPS | {"symmetric": False}, foreign.TOKEN),
        ({"num_bits": 8, "strategy": "channel"}, foreign.TOKEN),
        ({"num_bits": 8, "strategy": "channel", "type": "float"}, foreign.TOKEN | {"type": "float"}),
    ],
)
def test_round_trip_through_the_package(tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any] | None):
    """A file of the package, imported by recipe keep and exported again, has the same codes, scales and zero points."""
    source = foreign.compressed_tensors(tmp_path / "in", foreign.model_of(), weights, inputs)
    compress(source, recipe="keep", out=tmp_path / "small")
    report = export(tmp_path / "small", "compressed-tensors", tmp_path / "out")
    assert (report["dense_layers"], report["widened_layers"]) == ([], [])
    first, again = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert first.keys() == again.keys()
    for name in first:
        assert torch.equal(first[name].float(), again[name].float()), name
        assert first[name].dtype == again[name].dtype or name.endswith("scale")
    blocks = [
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (source, tmp_path / "out")
    ]
    assert blocks[0]["format"] == blocks[1]["format"]
    theirs = [read_by_the_package(path) for path in (source, tmp_path / "out")]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(theirs[0](ids).logits, theirs[1](ids).logits)


def test_gptq_goes_out_in_four_bits(tmp_path: Path):
    source, weights = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    compress(source, recipe="keep", out=tmp_path / "small")
    export(tmp_path / "small", "compressed-tensors", tmp_path / "out")
    theirs = read_by_the_package(tmp_path / "out")
    for name, weight in weights.items():
        assert torch.equal(theirs.get_submodule(name).weight, weight.half()), name


def test_conv1d_layers_are_written_dense(tmp_path: Path):
    small = compressed(tmp_path, "gpt2", "slidesparse", "quant=int8")
    with pytest.raises(InputError, match=r"layer transformer\.h\.0\S+ is stored as slide24 6:8, expected an nn.Linear"):
        export(small, "compressed-tensors", tmp_path / "theirs")


def test_layers_in_16_bits_are_written_dense(tmp_path: Path):
    source = foreign.compressed_tensors(tmp_path / "in", foreign.model_of(pattern=(2, 4)), GROUPS)
    name = "model.layers.1.mlp.down_proj"
    compress(source, recipe="keep", settings=[f"ignore=['{name}']"], out=tmp_path / "small")
    export(tmp_path / "small", "compressed-tensors", tmp_path / "out")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["ignore"] == ["lm_head", name]
    theirs, (dense, _) = read_by_the_package(tmp_path / "out"), load_dequantised(source)
    for (key, found), expected in zip(theirs.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(found, expected), key


def test_what_cannot_be_exported_is_refused(tmp_path: Path):
    small = compressed(tmp_path, "llama", "ec-spmv")
    with pytest.raises(InputError, match=r"no format for any layer .*: layer model\.layers\.0\S+ is stored as ec_csr"):
        export(small, "compressed-tensors", tmp_path / "out")
    with pytest.raises(InputError, match="known: dense, compressed-tensors"):
        export(small, "gguf", tmp_path / "out")
    with pytest.raises(InputError, match="is not compressed"):
        export(tmp_path / "dense", "dense", tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        export(small, "dense", tmp_path / "dense")
    assert not (tmp_path / "out").exists()
