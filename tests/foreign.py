"""Small model directories as other tools quantise them, written by compressed-tensors itself or by loops over bits.

The weights are rounded here, without any code of semisparse.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.models import byte_tokenizer, random_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 16}

TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
"""How compressed-tensors writes that x is rounded per token."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AutoAWQ packs columns 0 2 4 6 1 3 5 7: column 1 is the fifth 4 bits of a word."""


def model_of(dtype: torch.dtype = torch.bfloat16, pattern: tuple[int, int] | None = None) -> PreTrainedModel:
    """Return a small model; with a pattern (keep, window) the first weights of each window are zero."""
    model = random_model("llama", dtype, **SIZES)
    if pattern:
        keep, window = pattern
        for layer in linear_layers(model).values():
            columns = torch.arange(layer.in_features) % window
            layer.weight.data *= columns >= window - keep
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that tools quantise: all but the head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")}


def compressed_tensors(
    path: Path, model: PreTrainedModel, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **layout: Any
) -> Path:
    """Write a model as the package compressed-tensors does, its weights rounded by ranges.

    Args:
        path: the directory.
        model: is changed.
        weights: arguments of `QuantizationArgs`.
        inputs: likewise, of activations.
        layout: of `QuantizationScheme`, such as ``format``.
    """
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    activations = QuantizationArgs(**inputs) if inputs else None
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=activations, **layout)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for layer in linear_layers(model).values():
        tiles = _tiles(layer.weight.data, weights)
        scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), arguments)
        layer.weight_scale.data.copy_(scale.view(layer.weight_scale.shape))
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.copy_(zero.view(layer.weight_zero_point.shape))
        if hasattr(layer, "weight_g_idx"):
            count = layer.weight_scale.shape[1]
            layer.weight_g_idx.data.copy_(torch.randperm(layer.in_features) % count)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _tiles(weight: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return a weight [N, K] with the values of each scale along its last dimension."""
    match arguments["strategy"]:
        case "tensor":
            return weight.flatten()
        case "channel":
            return weight
        case "block":
            rows, columns = arguments["block_structure"]
            return weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
        case _:
            return weight.unflatten(1, (-1, arguments["group_size"]))


def replaced(
    path: Path,
    model: PreTrainedModel,
    block: dict[str, Any],
    layer_of: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
) -> tuple[Path, dict[str, Tensor]]:
    """Write a model with other tensors in the place of each linear weight.

    Args:
        path: the directory.
        model: dense.
        block: the ``quantization_config``.
        layer_of: weight [N, K] -> what is stored, and the weight [N, K] float32 that this stands for.
    Returns:
        The directory and the weights by their layers' names in the file.
    """
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    tensors, weights = load_file(path / "model.safetensors"), {}
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(f"{name}.weight").float()
        parts, weights[name] = layer_of(weight.T if model.config.model_type == "gpt2" else weight)
        tensors.update({f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    change_config(path, quantization_config=block)
    return path, weights


def change_config(path: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def rounded_to_groups(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight [N, K] to codes: [N, K], with scales [N, groups] float16 and zero points [N, groups].

    Args:
        weight: float32.
        bits: per code.
        groups: [K], the group of each column.
    """
    count = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(count)], 1).clamp(max=-1e-3)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(count)], 1).clamp(min=1e-3)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, 2**bits - 1)
    return codes.int(), scale, zero.int()


def gptq(
    path: Path, model: PreTrainedModel, bits: int = 4, size: int = 32, order: bool = False, version: str = "gptq"
) -> tuple[Path, dict[str, Tensor]]:
    """Write a model as GPTQ tools do. Returns the directory and the dense weights, as `replaced`."""

    def layer_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        k = weight.shape[1]
        groups = torch.arange(k) // (k if size == -1 else size)
        if order:
            groups = groups[torch.randperm(k)]
        codes, scale, zero = rounded_to_groups(weight, bits, groups)
        parts = {
            "qweight": words([bit_stream(row, bits) for row in codes.tolist()]).T,
            "qzeros": words([bit_stream(row, bits) for row in (zero - int(version == "gptq")).T.tolist()]),
            "scales": scale.T,
            "g_idx": groups.int(),
        }
        return parts, (codes - zero[:, groups]).float() * scale.float()[:, groups]

    block = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "checkpoint_format": version}
    return replaced(path, model, block, layer_of)


def awq(path: Path, model: PreTrainedModel, size: int = 32) -> tuple[Path, dict[str, Tensor]]:
    """Write a model as AutoAWQ does, for its GEMM kernels. Returns the directory and the dense weights."""

    def packed(rows: Tensor) -> Tensor:
        return words([[word_of(row[i : i + 8]) for i in range(0, len(row), 8)] for row in rows.tolist()])

    def layer_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = torch.arange(weight.shape[1]) // size
        codes, scale, zero = rounded_to_groups(weight, 4, groups)
        parts = {"qweight": packed(codes.T), "qzeros": packed(zero.T), "scales": scale.T}
        return parts, (codes - zero[:, groups]).float() * scale.float()[:, groups]

    block = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return replaced(path, model, block, layer_of)


def int8(path: Path, model: PreTrainedModel, rounds_x: bool = True) -> tuple[Path, dict[str, Tensor]]:
    """Write a model as compressed-tensors writes W8A8, or W8A16 in one byte per code, without that package."""

    def layer_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
    group |= {"input_activations": TOKEN} if rounds_x else {}
    block = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": group}}
    return replaced(path, model, block, layer_of)


def fp8(path: Path, model: PreTrainedModel, tile: tuple[int, int] | None) -> tuple[Path, dict[str, Tensor]]:
    """Write a model in fp8 with a scale per tile, as DeepSeek's, or (no tile) one per layer."""

    def layer_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if tile is None:
            scale = weight.abs().max() / 448
            values = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": values, "weight_scale_inv": scale}, values.float() * scale
        (n, k), (rows, columns) = weight.shape, tile
        scale, full = torch.empty(-(-n // rows), -(-k // columns)), torch.empty(n, k)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                full[part] = scale[i, j] = weight[part].abs().max() / 448
        values = (weight / full).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * full

    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(tile) if tile else None}
    return replaced(path, model, block, layer_of)


def mxfp4(path: Path, model: PreTrainedModel) -> Path:
    """Write a GPT-OSS model with random experts as it is published."""
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, n, k // 32), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    return path


def word_of(codes: list[int]) -> int:
    """Put eight 4-bit codes into one 32-bit word in AWQ's order."""
    return signed(sum(code << 4 * place for code, place in zip(codes, AWQ_PLACES, strict=True)))


def bit_stream(codes: list[int], bits: int) -> list[int]:
    """Put codes into 32-bit words without gaps, the first into the lowest bits."""
    number = sum(code << bits * i for i, code in enumerate(codes))
    return [signed(number >> 32 * i & 2**32 - 1) for i in range(-(-len(codes) * bits // 32))]


def signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word


def words(rows: list[list[int]]) -> Tensor:
    """Return rows of words as int32."""
    return torch.tensor(rows, dtype=torch.int32)
