"""The shapes of a model's linear layers: from an architecture's name, a model directory, or plain N,K."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from semisparse.errors import InputError
from semisparse.nn import is_linear, weight_of

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)

ARCHITECTURES = {
    "llama2-7b": ("llama", (4096, 11008, 32, 32, 32, 32000)),
    "llama2-13b": ("llama", (5120, 13824, 40, 40, 40, 32000)),
    "llama2-70b": ("llama", (8192, 28672, 80, 64, 8, 32000)),
    "llama3.1-8b": ("llama", (4096, 14336, 32, 32, 8, 128256)),
    "llama3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 128256)),
    "llama3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128256)),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 151936)),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-14b": ("qwen2", (5120, 13824, 48, 40, 8, 152064)),
}
"""Name -> transformers' model type, and the values of the fields `_SIZES` in the model's published config.json."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Layer -> the fused layer that inference engines such as vLLM compute it in."""


@dataclass(frozen=True)
class LayerShape:
    """A shape of weights, and the layers of a model that have it.

    Args:
        names: the last components of their names, as in ``q_proj, o_proj``; empty if only ``N,K`` was given.
        n: output features.
        k: input features.
        count: the number of such layers in the model.
    """

    names: str
    n: int
    k: int
    count: int

    @property
    def label(self) -> str:
        """The name in tables, such as ``q_proj, o_proj 4096,4096``."""
        return f"{self.names} {self.n},{self.k}".strip()


def layer_shapes(text: str) -> list[LayerShape]:
    """Return the distinct shapes of a model's linear layers, without the LM head.

    Args:
        text: ``N,K``, a model directory, or a name in `ARCHITECTURES`. ``:fused`` after the name fuses q, k, v into
            one layer, and gate, up into another.
    Raises:
        InputError: ``text`` is none of these, or config.json cannot be read.
    """
    plain = re.fullmatch(r"(\d+),(\d+)", text)
    if plain:
        return [LayerShape("", int(plain[1]), int(plain[2]), 1)]
    name, _, fused = text.partition(":")
    if name in ARCHITECTURES and fused in ("", "fused"):
        return _grouped(_linears(architecture(name)), bool(fused))
    return _grouped(_linears(_config_of(Path(text))), fused=False)


def architecture(name: str) -> PretrainedConfig:
    """Return the config of an architecture in `ARCHITECTURES`.

    Raises:
        InputError: the name is unknown; lists the known ones.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    family, sizes = ARCHITECTURES[name]
    return AutoConfig.for_model(family, **dict(zip(_SIZES, sizes, strict=True)))


def _config_of(directory: Path) -> PretrainedConfig:
    if not (directory / "config.json").is_file():
        known = ", ".join(ARCHITECTURES)
        raise InputError(
            f"got {directory}; expected N,K, a directory with a config.json, or one of these names, also followed by "
            f":fused: {known}"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise InputError(f"{directory}/config.json cannot be read: {error}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _linears(config: PretrainedConfig) -> list[tuple[str, int, int]]:
    """Return (name, N, K) of every linear layer but the LM head. The model is built on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    layers = [(name, module) for name, module in model.named_modules() if is_linear(module) and module is not head]
    return [(name, *weight_of(module).shape) for name, module in layers]


def _grouped(linears: list[tuple[str, int, int]], fused: bool) -> list[LayerShape]:
    """Group layers (name, N, K) by shape, after fusing them if ``fused``."""
    if fused:
        sizes: dict[str, tuple[int, int]] = {}
        for name, n, k in linears:
            parent, _, last = name.rpartition(".")
            fused_name = f"{parent}.{FUSED.get(last, last)}"
            sizes[fused_name] = (sizes.get(fused_name, (0, k))[0] + n, k)
        linears = [(name, n, k) for name, (n, k) in sizes.items()]
    groups: dict[tuple[int, int], list[str]] = {}
    for name, n, k in linears:
        groups.setdefault((n, k), []).append(name.rpartition(".")[2])
    return [LayerShape(", ".join(dict.fromkeys(names)), n, k, len(names)) for (n, k), names in groups.items()]
