"""Checkpoints that other tools quantised: every value against loops over bits, whole directories through `compress`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from semisparse.api import compress, evaluate, load
from semisparse.engine import Engine
from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers import METHODS, Rounded, load_dequantised, quantised_elsewhere
from semisparse.integrations.importers.method import unpack_words
from semisparse.integrations.importers.reading import SMALL
from semisparse.nn import is_linear
from tests.models import byte_tokenizer, random_model

torch.manual_seed(3)


def dequantise(method: str, tensors: dict[str, Tensor], block: dict) -> Tensor:
    """Measure a layer's tensors as `load_dequantised` does, and return its dense weight."""
    reader = METHODS[method]
    n, k = reader.measure({name: small_or_meta(tensor) for name, tensor in tensors.items()}, block)
    read = reader.read(tensors, block)
    weight = read.dequantised() if isinstance(read, Rounded) else read
    assert weight.shape == (n, k)
    return weight


def small_or_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() <= SMALL else tensor.to("meta")


def word_of(codes: list[int], bits: int, order: list[int] | None = None) -> int:
    """Put codes into one 32-bit word, the first into the lowest bits; ``order`` names the place of each."""
    places = order or list(range(len(codes)))
    word = sum(code << bits * place for code, place in zip(codes, places, strict=True))
    return word - 2**32 if word >= 2**31 else word


def bit_stream(codes: list[int], bits: int) -> list[int]:
    """Put codes into 32-bit words without gaps."""
    number = sum(code << bits * i for i, code in enumerate(codes))
    words = [number >> 32 * i & 2**32 - 1 for i in range(len(codes) * bits // 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def integers(words: list) -> Tensor:
    return torch.tensor(words, dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_in_a_stream_of_bits(bits: int):
    codes = torch.randint(0, 2**bits, (32, 3))
    words = integers([bit_stream(column.tolist(), bits) for column in codes.T]).T
    assert torch.equal(unpack_words(words.contiguous(), bits), codes.to(torch.uint8))


def gptq(weight_shape: tuple[int, int], bits: int, order: bool = False, version: str = "gptq"):
    """Return a layer as GPTQ stores it, and its weight by the formula, value by value."""
    n, k = weight_shape
    groups = 2
    codes, zeros = torch.randint(0, 2**bits, (n, k)), torch.randint(1, 2**bits, (n, groups))
    scales = torch.rand(groups, n).half() + 0.01
    index = torch.randperm(k) % groups if order else torch.arange(k) // (k // groups)
    less = 1 if version == "gptq" else 0
    tensors = {
        "qweight": integers([bit_stream(row.tolist(), bits) for row in codes]).T.contiguous(),
        "qzeros": integers([bit_stream([int(z) - less for z in zeros[:, g]], bits) for g in range(groups)]),
        "scales": scales,
    }
    if order:
        tensors["g_idx"] = index.to(torch.int32)
    weight = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            g = int(index[column])
            weight[row, column] = (int(codes[row, column]) - int(zeros[row, g])) * float(scales[g, row])
    return tensors, weight, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}


@pytest.mark.parametrize(
    ("bits", "order", "version"), [(4, False, "gptq"), (4, True, "gptq_v2"), (3, True, "gptq"), (8, False, "gptq")]
)
def test_gptq(bits: int, order: bool, version: str):
    tensors, weight, block = gptq((32, 64), bits, order, version)
    assert torch.equal(dequantise("gptq", tensors, block), weight)


def awq(n: int, k: int):
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # AutoAWQ packs columns 0 2 4 6 1 3 5 7: column 1 is the fifth 4 bits of a word
    groups = 2
    codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (groups, n))
    scales = torch.rand(groups, n).half() + 0.01

    def packed(rows: Tensor) -> Tensor:
        return integers([[word_of(row[i : i + 8], 4, order) for i in range(0, n, 8)] for row in rows.tolist()])

    weight = torch.empty(n, k)
    for row in range(n):
        for column in range(k):
            g = column // (k // groups)
            weight[row, column] = float(codes[column, row] - zeros[g, row]) * float(scales[g, row])
    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    return tensors, weight, {"quant_method": "awq", "bits": 4, "version": "gemm"}


def test_awq():
    tensors, weight, block = awq(24, 32)
    assert torch.equal(dequantise("awq", tensors, block), weight)


def test_fp8_in_tiles_and_by_row():
    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.1
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = dequantise("fp8", {"weight": values, "weight_scale_inv": scale}, block)
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        assert found[row, column] == values[row, column].float() * scale[row // 128, column // 128]
    rows = torch.rand(200, 1)
    assert torch.equal(dequantise("fbgemm_fp8", {"weight": values, "weight_scale": rows}, {}), values.float() * rows)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, False), (3, True)])
def test_compressed_tensors_packed_integers(bits: int, symmetric: bool):
    n, k, groups, per_word, half = 5, 48, 3, 32 // bits, 2 ** (bits - 1)
    codes = torch.randint(-half, half, (n, k))
    zeros = torch.zeros(n, groups, dtype=torch.int64) if symmetric else torch.randint(-half, half, (n, groups))
    scale = torch.rand(n, groups) + 0.01

    def packed(rows: list[list[int]]) -> Tensor:
        words = [[row[i : i + per_word] for i in range(0, len(row), per_word)] for row in rows]
        return integers([[word_of([code + half for code in word], bits) for word in row] for row in words])

    tensors = {
        "weight_packed": packed(codes.tolist()),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T.tolist()).T.contiguous()
    block = {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": 16}}}}
    index = torch.arange(k) // 16
    expected = (codes - zeros[:, index]).float() * scale[:, index]
    assert torch.equal(dequantise("compressed-tensors", tensors, block), expected)


def test_compressed_tensors_eight_bits_and_masks():
    codes, scale = torch.randint(-127, 128, (6, 16)).to(torch.int8), torch.rand(6, 1)
    assert torch.equal(
        dequantise("compressed-tensors", {"weight": codes, "weight_scale": scale}, {}), codes.float() * scale
    )
    block = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [4, 8]}}}}
    tiles = torch.rand(2, 2)
    found = dequantise("compressed-tensors", {"weight": codes, "weight_scale": tiles}, block)
    assert found[5, 9] == codes[5, 9].float() * tiles[1, 1]
    assert found[3, 7] == codes[3, 7].float() * tiles[0, 0]
    dense = torch.randn(4, 16).half() * (torch.arange(16) % 4 < 2)
    masks = torch.tensor([[0b00110011] * 2] * 4, dtype=torch.uint8)
    stored = {"compressed": dense[:, torch.arange(16) % 4 < 2], "bitmask": masks, "shape": torch.tensor([[4], [16]])}
    assert torch.equal(dequantise("compressed-tensors", stored, {}), dense)


def directory_of(tmp_path: Path, method: str) -> tuple[Path, dict[str, Tensor]]:
    """Write a small model whose linear layers a tool quantised; return the directory and the dense weights."""
    model = random_model("llama", hidden_size=32, intermediate_size=64, num_key_value_heads=4)
    path = tmp_path / method
    model.save_pretrained(path)
    tensors, weights, block = load_file(path / "model.safetensors"), {}, {}
    for name, module in model.named_modules():
        if is_linear(module) and "lm_head" not in name:
            n, k = module.weight.shape
            parts, weights[name], block = gptq((n, k), 4) if method == "gptq" else awq(n, k)
            del tensors[f"{name}.weight"]
            tensors.update({f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    return path, weights


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantised_directory_is_compressed(tmp_path: Path, method: str):
    path, weights = directory_of(tmp_path, method)
    assert quantised_elsewhere(path) == method
    loaded, _ = load_dequantised(path)
    for name, weight in weights.items():
        assert torch.equal(loaded.get_submodule(name).weight, weight.to(loaded.dtype))
    if method == "awq":
        return
    byte_tokenizer().save_pretrained(path)
    settings = ["prune=magnitude", "search=none", "tune=none", "pattern=2:4", "format=bitmask"]
    compress(path, recipe="rheosparse", settings=settings, out=tmp_path / "out")
    kept = load(tmp_path / "out").get_submodule(next(iter(weights))).weight
    dense = weights[next(iter(weights))].to(kept.dtype)
    assert torch.equal(kept[kept != 0], dense[kept != 0])


def test_eval_measures_the_dequantised_weights_and_generate_names_the_command(tmp_path: Path):
    path, weights = directory_of(tmp_path, "gptq")
    dense = random_model("llama", hidden_size=32, intermediate_size=64, num_key_value_heads=4)
    dense.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    for name, weight in weights.items():
        dense.get_submodule(name).weight.data.copy_(weight)
    dense.save_pretrained(tmp_path / "dense")
    for folder in (path, tmp_path / "dense"):
        byte_tokenizer().save_pretrained(folder)
    with pytest.warns(UserWarning, match=f"{path} was quantised by gptq: its weights are dequantised"):
        measured = evaluate(path, tmp_path / "dense", ["some text " * 20], seqlen=32)
    assert measured["nll"] == evaluate(tmp_path / "dense", text=["some text " * 20], seqlen=32)["nll"]
    assert measured["kl"] == 0
    with pytest.raises(CheckpointError, match=r"'gptq', not by semisparse; `semisparse compress MODEL --recipe keep"):
        Engine(path)


@pytest.mark.parametrize(
    ("part", "damaged", "message"),
    [
        ("qzeros", None, "tensor qzeros is missing"),
        ("scales", torch.zeros(3, 5), "expected \\[3, 32\\] for 4-bit codes"),
        ("qweight", torch.zeros(4, dtype=torch.int32), "expected int32 with 2 dimensions"),
        ("g_idx", torch.full((64,), 9, dtype=torch.int32), "names groups 9 to 9, expected 0 to 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(part: str, damaged: Tensor | None, message: str):
    tensors, _, block = gptq((32, 64), 4)
    tensors[part] = damaged
    with pytest.raises(CheckpointError, match=message):
        dequantise("gptq", {name: tensor for name, tensor in tensors.items() if tensor is not None}, block)


def test_what_is_not_known_is_refused():
    tensors, _, block = gptq((32, 64), 4)
    with pytest.raises(InputError, match="5 bits"):
        dequantise("gptq", tensors, block | {"bits": 5})
    with pytest.raises(InputError, match="version 'marlin'"):
        dequantise("awq", tensors, {"bits": 4, "version": "marlin"})
    with pytest.raises(InputError, match="4-bit floats"):
        dequantise("compressed-tensors", {"weight_packed": torch.zeros(2, 2, dtype=torch.uint8)}, {})


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (4, True), (8, True)])
def test_what_the_compressed_tensors_package_packed(bits: int, symmetric: bool):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=bits, group_size=16, strategy="group", symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    half = 2 ** (bits - 1)
    scale = torch.rand(12, 4) + 0.01
    zeros = torch.zeros(12, 4, dtype=torch.int8)
    if not symmetric:
        zeros = torch.randint(-half, half, (12, 4)).to(torch.int8)
    weight = torch.randn(12, 64)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(parts, scheme)
    block = {"config_groups": {"group_0": {"weights": arguments.model_dump(mode="json")}}}
    found = dequantise("compressed-tensors", packed, block)
    assert torch.equal(found, compressor.decompress(packed, scheme)["weight"])
