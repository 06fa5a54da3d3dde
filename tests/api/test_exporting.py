"""Compressed models for tools without semisparse, and dense models from packed layers in memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from semisparse.api import compress, export, load
from semisparse.errors import InputError
from semisparse.integrations.importers import load_dequantised
from semisparse.nn import SparseLinear, join_layers
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


@pytest.mark.parametrize(("kind", "kept"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_compressed_tensors_own_package_reads_them(tmp_path: Path, kind: str, kept: torch.dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    small = compressed(tmp_path, "llama", "slidesparse", f"quant={kind}")
    export(small, "compressed-tensors", tmp_path / "theirs")
    block = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(block).config_groups.values()
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    for name, layer in load(small).named_modules():
        if isinstance(layer, SparseLinear):
            parts = {part: tensors[f"{name}.{part}"] for part in ("weight", "weight_scale")}
            assert parts["weight"].dtype == kept
            found = compressor.decompress(parts, scheme)["weight"]
            torch.testing.assert_close(found.to(layer.weight.dtype), layer.weight, rtol=2**-8, atol=0)


def test_what_cannot_be_exported_is_refused(tmp_path: Path):
    small = compressed(tmp_path, "llama", "gqsa")
    with pytest.raises(InputError, match="has no format for any layer"):
        export(small, "compressed-tensors", tmp_path / "out")
    with pytest.raises(InputError, match="known: dense, compressed-tensors"):
        export(small, "gguf", tmp_path / "out")
    with pytest.raises(InputError, match="is not compressed"):
        export(tmp_path / "dense", "dense", tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        export(small, "dense", tmp_path / "dense")
    assert not (tmp_path / "out").exists()
