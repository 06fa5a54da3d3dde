"""Checkpoints of llama2-7b's shapes with random weights, for `benchmarks/vllm_speed.py`.

python benchmarks/vllm_checkpoints.py gqs-w4s50 /tmp/out --layers 32
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from semisparse.bench.roofline import random_weight
from semisparse.checkpoint import METHOD
from semisparse.formats.base import get_format
from semisparse.patterns import parse_pattern

COLUMNS: dict[str, tuple[str, str, dict[str, str]]] = {
    "bitmask": ("bitmask", "32:64", {}),
    "gqs-w4s50": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs-dense-w4": ("gqs", "g128@0%", {"kind": "w4"}),
    "vector_nm": ("vector_nm", "16:32v32", {}),
    "ec_csr": ("ec_csr", "70%", {}),
    "slide24-2:4-int8": ("slide24", "2:4", {"kind": "int8"}),
    "slide24-6:8-int8": ("slide24", "6:8", {"kind": "int8"}),
}
"""Our formats: name -> format, pattern, pack options."""

RIVALS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fp8": {"quantization": "fp8"},
    "int4": {},
}
"""vLLM's own: name -> engine arguments. ``int4`` is described in its config.json."""

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}
"""compressed-tensors' W4A16 with groups of 128: 4 bits as vLLM users have them."""


def write_dense(folder: Path, layers: int, block: Mapping[str, Any] | None = None) -> Path:
    """Write config.json alone: vLLM makes up the weights (``load_format="dummy"``)."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    if block is not None:
        config.quantization_config = dict(block)
    config.save_pretrained(folder)
    return folder


def write_ours(folder: Path, layers: int, column: str) -> Path:
    """Write a checkpoint with random weights, drawn and packed on the GPU. Layers of one shape have one weight."""
    name, written, options = COLUMNS[column]
    pattern, device = parse_pattern(written), torch.device("cuda")
    shapes = {
        **{f"self_attn.{part}_proj": (4096, 4096) for part in "qkvo"},
        "mlp.gate_proj": (11008, 4096),
        "mlp.up_proj": (11008, 4096),
        "mlp.down_proj": (4096, 11008),
    }
    packed = {}
    for shape in set(shapes.values()):
        weight = random_weight(pattern, *shape, torch.bfloat16, device)
        packed[shape] = get_format(name).pack(weight, pattern, **options).to("cpu")
    entries = {}
    for layer in range(layers):
        prefix, tensors = f"model.layers.{layer}", {}
        for part, shape in shapes.items():
            entries[f"{prefix}.{part}"] = packed[shape].spec.to_dict()
            tensors |= {f"{prefix}.{part}.{key}": t.clone() for key, t in packed[shape].tensors.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(4096, dtype=torch.bfloat16)
        save_file(tensors, folder / f"model-{layer:05}.safetensors", metadata={"format": "pt"})
    rest = {
        f"{key}.weight": torch.randn(32000, 4096, dtype=torch.bfloat16) for key in ("model.embed_tokens", "lm_head")
    }
    rest["model.norm.weight"] = torch.ones(4096, dtype=torch.bfloat16)
    save_file(rest, folder / "model-rest.safetensors", metadata={"format": "pt"})
    return write_dense(folder, layers, {"quant_method": METHOD, "version": 1, "layers": entries})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("column", choices=COLUMNS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    write_ours(arguments.folder, arguments.layers, arguments.column)
