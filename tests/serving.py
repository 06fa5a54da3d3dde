"""Small compressed model directories of every format, for the tests of the frameworks that serve them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from semisparse.checkpoint import atomic_directory
from semisparse.formats import registry
from semisparse.integrations.transformers import mark_compressed
from semisparse.nn import is_linear, replace_linear, weight_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns
from tests.models import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "architectures": ["LlamaForCausalLM"],
}


@dataclass(frozen=True)
class Served:
    """A compressed model: its name, how its layers are stored, and what is special about it.

    Args:
        name: of the test.
        format: of every layer.
        pattern: of a layer, by its name.
        options: of packing.
        config: the model's.
        dense: the ends of the names of layers that are left dense.
    """

    name: str
    format: str
    pattern: Callable[[str], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    config: PreTrainedConfig = field(default_factory=lambda: LlamaConfig(**SIZES))
    dense: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """A name for its directory."""
        return re.sub("[^a-z0-9_-]", "-", self.name)

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded to 8 bits."""
        return any("8" in str(option) for option in self.options.values())


def one(pattern: str) -> Callable[[str], str]:
    return lambda name: pattern


def searched(name: str) -> str:
    """Give every layer another density, as a search does."""
    return f"{16 + 2 * (sum(map(ord, name)) % 16)}:64"


def every_format() -> list[Served]:
    """Every format with every option on the patterns it accepts, and shapes and models that are difficult to cut."""
    found = []
    for name, form in registry().items():
        # One pattern of each family, of windows that divide a rank's columns; tests/nn/test_slicing.py has the others.
        taken = [p for p in accepted_patterns(name) if 64 % parse_pattern(p).step == 0]
        patterns = list({type(parse_pattern(p)): p for p in reversed(taken)}.values())
        found += [Served(f"{name}-{p}", name, one(p)) for p in patterns]
        for options in form.variants:
            if options:
                label = "-".join(map(str, options.values()))
                found.append(Served(f"{name}-{patterns[0]}-{label}", name, one(patterns[0]), options))
    llama = {**SIZES, "architectures": ["LlamaForCausalLM"]}
    return [
        *found,
        Served("searched", "bitmask", searched),
        Served("ragged", "bitmask", one("32:64"), config=LlamaConfig(**{**llama, "intermediate_size": 344})),
        Served("one-kv-head", "bitmask", one("32:64"), config=LlamaConfig(**{**llama, "num_key_value_heads": 1})),
        Served("bias", "bitmask", one("32:64"), config=Qwen2Config(**{**SIZES, "architectures": ["Qwen2ForCausalLM"]})),
        Served("some-dense", "bitmask", one("32:64"), dense=("o_proj", "gate_proj", "up_proj")),
    ]


def write(served: Served, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the directory, with random weights and biases."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(served.config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return write_compressed(model, byte_tokenizer(), served, out)


def write_compressed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, served: Served, out: Path) -> Path:
    """Write a model's directory, its weights pruned by magnitude and packed. The model is changed."""
    layers = {}
    for name, module in list(model.base_model.named_modules(prefix=model.base_model_prefix)):
        if is_linear(module) and not name.endswith(served.dense):
            pattern, weight = parse_pattern(served.pattern(name)), weight_of(module)
            weight.mul_(pattern.mask(weight.abs().float()))
            packed = registry()[served.format].pack(weight, pattern, **served.options)
            replace_linear(model, name, packed)
            layers[name] = packed.spec.to_dict()
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "layers": layers})
    with atomic_directory(out) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return out
