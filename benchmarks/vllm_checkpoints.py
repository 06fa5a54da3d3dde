"""Checkpoints with random weights and the shapes of known models, for `benchmarks/vllm_speed.py`.

python benchmarks/vllm_checkpoints.py gqs-w4s50 /tmp/out --model llama2-7b --layers 32
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from semisparse.bench.roofline import random_weight
from semisparse.checkpoint import METHOD
from semisparse.formats.base import Packed, get_format
from semisparse.patterns import parse_pattern

COLUMNS: dict[str, tuple[str, str, dict[str, str]]] = {
    "bitmask": ("bitmask", "32:64", {}),
    "bitmask-w4": ("bitmask", "32:64", {"kind": "w4"}),
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


MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama2-7b": (
        LlamaConfig,
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
    ),
    "qwen2.5-1.5b": (
        Qwen2Config,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
}
"""Shapes: name -> config class and its arguments."""


def config_of(model: str, layers: int | None) -> PreTrainedConfig:
    """Return a model's config, with other than all of its decoder layers if ``layers`` is given."""
    kind, arguments = MODELS[model]
    return kind(**{**arguments, "dtype": "bfloat16", **({} if layers is None else {"num_hidden_layers": layers})})


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return [N, K] of each linear layer of a decoder layer, by its name in it."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_dense(folder: Path, config: PreTrainedConfig, block: Mapping[str, Any] | None = None) -> Path:
    """Write config.json alone: vLLM makes up the weights (``load_format="dummy"``)."""
    if block is not None:
        config.quantization_config = dict(block)
    config.save_pretrained(folder)
    return folder


def packed_of(config: PreTrainedConfig, column: str, device: torch.device) -> dict[tuple[int, int], Packed]:
    """Return a random packed weight for each shape, packed on a device."""
    name, written, options = COLUMNS[column]
    pattern = parse_pattern(written)
    return {
        shape: get_format(name).pack(random_weight(pattern, *shape, torch.bfloat16, device), pattern, **options)
        for shape in set(shapes_of(config).values())
    }


def write_ours(folder: Path, config: PreTrainedConfig, column: str) -> Path:
    """Write a checkpoint with random weights, packed on a GPU if there is one. Layers of one shape have one weight."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes, hidden = shapes_of(config), config.hidden_size
    packed = {shape: weight.to("cpu") for shape, weight in packed_of(config, column, device).items()}
    entries = {}
    for layer in range(config.num_hidden_layers):
        prefix, tensors = f"model.layers.{layer}", {}
        for part, shape in shapes.items():
            entries[f"{prefix}.{part}"] = packed[shape].spec.to_dict()
            tensors |= {f"{prefix}.{part}.{key}": t.clone() for key, t in packed[shape].tensors.items()}
            if isinstance(config, Qwen2Config) and part[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{part}.bias"] = torch.zeros(shape[0], dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        save_file(tensors, folder / f"model-{layer:05}.safetensors", metadata={"format": "pt"})
    ends = ("model.embed_tokens",) if config.tie_word_embeddings else ("model.embed_tokens", "lm_head")
    rest = {f"{key}.weight": torch.randn(config.vocab_size, hidden, dtype=torch.bfloat16) for key in ends}
    rest["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(rest, folder / "model-rest.safetensors", metadata={"format": "pt"})
    return write_dense(folder, config, {"quant_method": METHOD, "version": 1, "layers": entries})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("column", choices=COLUMNS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, default="llama2-7b")
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    write_ours(arguments.folder, config_of(arguments.model, arguments.layers), arguments.column)
