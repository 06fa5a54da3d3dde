"""Writing layers in 8 bits in compressed-tensors' formats ``int-quantized`` and ``float-quantized``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.nn import SparseLinear

FORMATS = {torch.int8: ("int", "int-quantized"), torch.float8_e4m3fn: ("float", "float-quantized")}
"""compressed-tensors' type of number and format, by dtype."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight in 8 bits with a scale per row.

    Args:
        codes: [N, K] int8 or float8_e4m3fn.
        scale: [N, 1] float32.
    """

    codes: Tensor
    scale: Tensor


def quantised_layers(model: PreTrainedModel) -> dict[str, QuantisedWeight]:
    """Return the layers of a model whose packed weight is stored in 8 bits with a scale per row, by module name."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            weight = _quantised(layer)
            if weight is not None:
                found[name] = weight
    return found


def _quantised(layer: SparseLinear) -> QuantisedWeight | None:
    """Return a layer's codes. They follow from the unpacked weight: rounding it to 16 bits moves no code by a half."""
    tensors = layer.packed.tensors
    values, scale = tensors.get("values"), tensors.get("scale")
    if values is None or scale is None or values.dtype not in FORMATS or scale.shape != (layer.out_features,):
        return None
    scaled = layer.weight.float() / scale[:, None]
    codes = (scaled.round() if values.dtype == torch.int8 else scaled).to(values.dtype)
    return QuantisedWeight(codes, scale[:, None].clone())


def rewrite(directory: Path, layers: Mapping[str, QuantisedWeight]) -> None:
    """Replace dense weights in a model directory by quantised ones, and declare them in config.json.

    Args:
        directory: as ``save_pretrained`` wrote it.
        layers: quantised weights by module name.
    """
    weight_map, total = {}, 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
            metadata = opened.metadata()
        for name in [name for name in tensors if name.removesuffix(".weight") in layers and name.endswith(".weight")]:
            weight = layers[name.removesuffix(".weight")]
            tensors[name], tensors[f"{name}_scale"] = weight.codes, weight.scale
        save_file(tensors, file, metadata)
        weight_map.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    config = directory / "config.json"
    declared = json.loads(config.read_text()) | {"quantization_config": _declaration(layers)}
    config.write_text(json.dumps(declared, indent=2))


def _declaration(layers: Mapping[str, QuantisedWeight]) -> dict[str, Any]:
    """Return the ``quantization_config``: a group per kind of number; x is quantised per token, as our kernels do."""
    groups: dict[str, Any] = {}
    formats = []
    for dtype, (kind, layout) in FORMATS.items():
        names = [name for name, weight in layers.items() if weight.codes.dtype == dtype]
        if names:
            common = {"num_bits": 8, "type": kind, "symmetric": True}
            groups[f"group_{len(groups)}"] = {
                "targets": names,
                "weights": common | {"strategy": "channel", "dynamic": False},
                "input_activations": common | {"strategy": "token", "dynamic": True},
                "format": layout,
            }
            formats.append(layout)
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
    }
