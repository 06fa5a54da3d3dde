"""Quantised checkpoints are stored with exactly their codes, scales and zero points, or refused with the reason."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from semisparse.api import compress, load
from semisparse.errors import CheckpointError, InputError, RecipeError, SemisparseError
from semisparse.integrations.importers import load_dequantised
from semisparse.nn import SparseLinear
from tests import foreign
from tests.architectures import tiny_model
from tests.choosing import mostly_slow
from tests.models import random_model

GROUPS = {"num_bits": 4, "group_size": 32, "strategy": "group"}
CHANNEL = {"num_bits": 8, "strategy": "channel"}


def kept(source: Path, out: Path, *settings: str, recipe: str = "keep") -> dict[str, SparseLinear]:
    """Compress a directory by a recipe, and return the layers as they load again."""
    report = compress(source, recipe=recipe, settings=settings, out=out)
    assert all(layer["outcome"].startswith("kept ") for layer in report.layers)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "semisparse"
    return {n: m for n, m in load(out).named_modules() if isinstance(m, SparseLinear)}


def assert_same(layers: dict[str, SparseLinear], weights: dict[str, Tensor]) -> None:
    """Check that layers unpack to weights [N, K] float32, cast to their dtype."""
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.weight, weights[name].to(layer.weight.dtype)), name


@pytest.mark.parametrize(
    ("bits", "size", "version", "stored"),
    [
        (4, 32, "gptq", "gqs w4 g32@0%"),
        (4, -1, "gptq_v2", "gqs w4 g128@0%"),
        (8, 16, "gptq", "gqs w8 g16@0%"),
        (3, 32, "gptq_v2", "gqs w3 g32@0%"),
        (2, 16, "gptq", "gqs w2 g16@0%"),
    ],
)
def test_gptq(tmp_path: Path, bits: int, size: int, version: str, stored: str):
    path, weights = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16), bits, size, version=version)
    layers = kept(path, tmp_path / "out")
    assert_same(layers, weights)
    entries = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layers"]
    assert {entry["outcome"] for entry in entries.values()} == {f"kept {stored}"}


def test_awq(tmp_path: Path):
    path, weights = foreign.awq(tmp_path / "in", foreign.model_of(torch.float16))
    assert_same(kept(path, tmp_path / "out"), weights)


def test_fp8_with_one_scale(tmp_path: Path):
    path, weights = foreign.fp8(tmp_path / "in", foreign.model_of(), None)
    layers = kept(path, tmp_path / "out")
    assert_same(layers, weights)
    assert {(layer.packed.spec.format, layer.packed.params["kind"]) for layer in layers.values()} == {("dense", "fp8")}


@pytest.mark.parametrize(
    ("weights", "inputs", "stored"),
    [
        pytest.param(GROUPS | {"symmetric": True}, None, "gqs w4 g32@0%", marks=pytest.mark.slow),
        (GROUPS | {"symmetric": False}, None, "gqs w4 g32@0%"),
        (GROUPS | {"symmetric": True}, foreign.TOKEN, "gqs w4a8 g32@0%"),
        (CHANNEL | {"num_bits": 4, "symmetric": False}, None, "gqs w4 g128@0%"),
        (CHANNEL, foreign.TOKEN, "dense int8"),
        pytest.param({"num_bits": 8, "strategy": "tensor"}, foreign.TOKEN, "dense int8", marks=pytest.mark.slow),
        (CHANNEL, None, "gqs w8 g128@0%"),
        pytest.param(CHANNEL | {"symmetric": False}, foreign.TOKEN, "gqs w8 g128@0%", marks=pytest.mark.slow),
        (CHANNEL | {"type": "float"}, foreign.TOKEN, "dense fp8"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, foreign.TOKEN, "dense fp8"),
    ],
)
def test_compressed_tensors(tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any] | None, stored: str):
    """The package writes the checkpoint, and dequantises it for comparison."""
    path = foreign.compressed_tensors(tmp_path / "in", foreign.model_of(), weights, inputs)
    layers = kept(path, tmp_path / "out")
    assert_same(layers, theirs(path, layers))
    entries = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layers"]
    assert {entry["outcome"] for entry in entries.values()} == {f"kept {stored}"}


def theirs(path: Path, layers: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a directory as transformers dequantises them with the package compressed-tensors."""
    from transformers import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    return {name: model.get_submodule(name).weight.data for name in layers}


@pytest.mark.parametrize(("rounds_x", "stored"), [(True, ("dense", "int8")), (False, ("gqs", "w8"))])
def test_int8_is_rounded_with_x_only_where_x_was_rounded(tmp_path: Path, rounds_x: bool, stored: tuple[str, str]):
    path, weights = foreign.int8(tmp_path / "in", foreign.model_of(torch.float32), rounds_x)
    layers = kept(path, tmp_path / "out")
    assert_same(layers, weights)
    assert {(layer.packed.spec.format, layer.packed.params["kind"]) for layer in layers.values()} == {stored}


def test_gpt2_s_conv1d_is_transposed(tmp_path: Path):
    model = random_model("gpt2", torch.float16, n_embd=64)
    path, weights = foreign.gptq(tmp_path / "in", model)
    read, rounded = load_dequantised(path)
    assert (
        rounded.keys()
        == weights.keys()
        == {f"transformer.h.{i}.{part}.c_proj" for i in (0, 1) for part in ("attn", "mlp")}
    )
    for name, weight in weights.items():
        assert torch.equal(read.get_submodule(name).weight, weight.T.half())
    assert_same(kept(path, tmp_path / "out"), weights)


def test_sparse_8_bits_of_compressed_tensors_multiply_in_8_bits(tmp_path: Path):
    path = foreign.compressed_tensors(tmp_path / "in", foreign.model_of(pattern=(6, 8)), CHANNEL, foreign.TOKEN)
    layers = kept(path, tmp_path / "out", "quant=keep", "prune=none", recipe="slidesparse")
    assert {(m.packed.spec.format, m.packed.params["kind"]) for m in layers.values()} == {("slide24", "int8")}
    assert_same(layers, theirs(path, layers))
    lowest = min(int(layer.packed.tensors["values"].min()) for layer in layers.values())
    assert lowest == -128  # the package rounds to it, our own packer does not


def test_groups_pruned_elsewhere_are_dropped(tmp_path: Path):
    model = foreign.model_of(torch.float16)
    for layer in foreign.linear_layers(model).values():
        layer.weight.data *= torch.arange(layer.in_features) // 16 % 2
    path, weights = foreign.gptq(tmp_path / "in", model, size=32)
    layers = kept(path, tmp_path / "out", "prune=none", recipe="gqsa")
    assert_same(layers, weights)
    assert {str(layer.packed.pattern) for layer in layers.values()} == {"g16@50%"}
    assert all(layer.packed.bits_per_weight < 4 for layer in layers.values())


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: foreign.fp8(path, foreign.model_of(), (32, 32))[0], "a scale per tile of 32 x 32"),
        (
            lambda path: foreign.gptq(path, foreign.model_of(torch.float16), order=True)[0],
            "columns of its groups are not adjacent",
        ),
        (
            lambda path: foreign.gptq(path, foreign.model_of(torch.bfloat16))[0],
            "scales are float16, which the model's dtype bfloat16 does not hold",
        ),
        (
            lambda path: foreign.compressed_tensors(path, foreign.model_of(), CHANNEL | {"type": "float"}),
            "activations that are quantised to fp8",
        ),
        (
            lambda path: foreign.compressed_tensors(path, foreign.model_of(), GROUPS | {"actorder": "group"}),
            "columns of its groups are not adjacent",
        ),
    ],
)
def test_what_no_format_holds_is_refused_and_read_in_16_bits(tmp_path: Path, write: Any, reason: str):
    path = write(tmp_path / "in")
    with pytest.raises(InputError, match=rf"layer model.layers.0.*cannot be stored as it was rounded: .*{reason}"):
        compress(path, recipe="keep", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model, rounded = load_dequantised(path)
    compress(path, recipe="keep", settings=["quant=none"], out=tmp_path / "out")
    layers = {n: m for n, m in load(tmp_path / "out").named_modules() if isinstance(m, SparseLinear)}
    assert_same(layers, {name: model.get_submodule(name).weight.data for name in rounded})


def test_recipes_that_would_change_the_numbers_are_refused(tmp_path: Path):
    path, _ = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    with pytest.raises(InputError, match="its numbers are those of quant=w4, the recipe says w8"):
        compress(path, recipe="dense-w8", settings=["prune=none"], out=tmp_path / "out")
    with pytest.raises(InputError, match=r"its groups have 32 columns, the recipe's pattern is g128@0%"):
        compress(path, recipe="dense-w4", settings=["prune=none"], out=tmp_path / "out")
    with pytest.raises(RecipeError, match="set prune=none"):
        compress(path, recipe="keep", settings=["prune=magnitude"], out=tmp_path / "out")
    foreign.model_of().save_pretrained(tmp_path / "dense")
    foreign.byte_tokenizer().save_pretrained(tmp_path / "dense")
    with pytest.raises(InputError, match="no layer of this one is rounded"):
        compress(tmp_path / "dense", recipe="keep", out=tmp_path / "out")


def test_a_format_that_would_change_a_weight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, _ = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    from semisparse.quant import group

    rounded = group.GroupScales.values
    monkeypatch.setattr(group.GroupScales, "values", lambda self, codes: rounded(self, codes) * 1.01)
    with pytest.raises(InputError, match=r"format gqs would store \S+, expected \S+, at row 0, column"):
        compress(path, recipe="keep", out=tmp_path / "out")


def test_experts_are_read_and_not_kept(tmp_path: Path):
    path, weights = foreign.gptq(tmp_path / "in", tiny_model("Qwen3-MoE", torch.float16), size=16)
    read, rounded = load_dequantised(path)
    expert = "model.layers.1.mlp.experts.2.gate_proj"
    assert rounded.keys() == weights.keys() > {expert}
    fused = read.model.layers[1].mlp.experts.gate_up_proj[2]
    assert torch.equal(fused[: len(weights[expert])], weights[expert].half())
    with pytest.raises(InputError, match=r"layer model.layers.0.mlp.experts.0.down_proj .*fused"):
        compress(path, recipe="keep", out=tmp_path / "out")
    with pytest.raises(InputError, match=r"layer model.layers.0.mlp.experts.0.down_proj .*fused"):
        compress(path, recipe="dense-w4", settings=["prune=none", "pattern=g16@0%"], out=tmp_path / "out")


def test_layers_that_were_not_rounded_stay_dense(tmp_path: Path):
    path, weights = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    tensors = foreign.load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = weights[name].half()
    foreign.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    layers = kept(path, tmp_path / "out")
    assert layers.keys() == weights.keys() - {name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 128}, r"holds a weight \[64, 96\], expected \[64, 128\] by config.json"),
        ({"hidden_size": 2**20}, "too many for"),
        ({"attn_implementation": "someone/kernel"}, "code from elsewhere"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
):
    path, _ = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    foreign.change_config(path, **changes)
    from semisparse.integrations.importers import gptq

    monkeypatch.setattr(gptq, "unpack_words", None)
    with pytest.raises(CheckpointError, match=message):
        load_dequantised(path)


def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path):
    path, weights = foreign.fp8(tmp_path / "in", foreign.model_of(), (32, 32))
    read, _ = load_dequantised(path)
    theirs = AutoModelForCausalLM.from_pretrained(path)  # dequantises without a GPU
    for name, weight in weights.items():
        assert torch.equal(read.get_submodule(name).weight, weight.to(torch.bfloat16))
        assert torch.equal(read.get_submodule(name).weight, theirs.get_submodule(name).weight.to(torch.bfloat16))


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path):
    from transformers import Mxfp4Config

    path = foreign.mxfp4(tmp_path / "in", tiny_model("GPT-OSS", torch.bfloat16, intermediate_size=64))
    read, rounded = load_dequantised(path)
    theirs = AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True))
    assert not rounded
    for (name, found), expected in zip(read.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected.to(found.dtype)), name
    assert read.model.layers[0].mlp.experts.gate_up_proj.float().std() > 0.01
    settings = ["prune=magnitude", "pattern=2:4", "format=bitmask", "search=none", "tune=none"]
    compress(path, recipe="rheosparse", settings=settings, out=tmp_path / "out")


PARTS = 7
NASTY = [None, -1, 0, 3, 1 << 60, 4.5, "x", [], [1], [0, 0], {}, {"x": 1}, True]


@pytest.mark.parametrize("part", mostly_slow(range(PARTS), 0))
@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors"])
def test_hostile_blocks_and_tensors_are_refused_or_read(tmp_path: Path, method: str, part: int):
    """Every value of the block and every tensor of a layer is replaced; what is read has the right shape.

    A part is every seventh of these changes.
    """
    model = foreign.model_of(torch.float16)
    if method == "compressed-tensors":
        path = foreign.compressed_tensors(tmp_path / "in", model, GROUPS | {"symmetric": False})
    else:
        writers = {"gptq": foreign.gptq, "awq": foreign.awq, "fp8": partial(foreign.fp8, tile=(32, 32))}
        path, _ = writers[method](tmp_path / "in", model)
    block = json.loads((path / "config.json").read_text())["quantization_config"]
    for changed in [*_variants(block), *[{**block, key: value} for key in block for value in NASTY]][part::PARTS]:
        foreign.change_config(path, quantization_config={**changed, "quant_method": method})
        _read_or_refuse(path)
    foreign.change_config(path, quantization_config=block)
    tensors = foreign.load_file(path / "model.safetensors")
    changes: list[tuple[str, Tensor | None]] = []
    for name in [name for name in tensors if name.startswith("model.layers.0.mlp.up_proj.")]:
        good = tensors[name]
        broken = (good[:0], good[..., :-1], good.flatten(), good.view(torch.uint8), good.double(), good[None], None)
        changes += [(name, bad) for bad in broken]
    for name, bad in changes[part::PARTS]:
        changed = {**tensors, name: bad.contiguous()} if bad is not None else dict(tensors)
        if bad is None:
            del changed[name]
        foreign.save_file(changed, path / "model.safetensors", {"format": "pt"})
        _read_or_refuse(path)


def _variants(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return blocks of compressed-tensors with each argument of weights replaced."""
    found = []
    for key in ("num_bits", "group_size", "strategy", "block_structure", "symmetric"):
        for value in NASTY if "config_groups" in block else []:
            changed = json.loads(json.dumps(block))
            next(iter(changed["config_groups"].values()))["weights"][key] = value
            found.append(changed)
    return found


def _read_or_refuse(path: Path) -> None:
    with contextlib.suppress(SemisparseError):
        model, _ = load_dequantised(path)
        assert model.model.layers[0].mlp.up_proj.weight.shape == (96, 64)


def test_a_missing_tensor_is_refused(tmp_path: Path):
    path, _ = foreign.gptq(tmp_path / "in", foreign.model_of(torch.float16))
    tensors = foreign.load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    foreign.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        load_dequantised(path)
