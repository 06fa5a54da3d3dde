"""The directories that cases mutate: layers of every format and kind, experts, and what other tools write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from semisparse.api.packing import pack_for_disk
from semisparse.integrations.transformers import mark_compressed
from semisparse.nn import is_linear, replace_linear, split_experts, weight_of
from semisparse.patterns import parse_pattern
from tests import foreign
from tests.architectures import tiny_model
from tests.models import random_model

Layer = tuple[str, str, dict[str, Any]]
"""Format, pattern and pack options of a layer."""

PACKED: tuple[Layer, ...] = (
    ("bitmask", "32:64", {}),
    ("bitmask", "70%", {}),
    ("ec_csr", "70%", {}),
    ("ec_csr", "50%/row", {"layout": "paper"}),
    ("dense", "2:4", {}),
    ("dense", "0%", {"kind": "int8"}),
    ("gqs", "g8@50%", {}),
    ("gqs", "g4@25%/row", {"kind": "w2"}),
    ("slide24", "6:8", {}),
    ("slide24", "4:6", {"kind": "fp8"}),
    ("vector_nm", "8:32v4", {}),
    ("vector_nm", "1:2v1", {}),
    ("gqs", "g16@0%", {"kind": "w8"}),
    ("dense", "0%", {"kind": "fp8_tensor"}),
)
"""The layers of the directories ``whole`` and ``sharded``, in turn."""

CODED: tuple[Layer, ...] = (
    ("bitmask", "32:64", {"kind": "w8"}),
    ("bitmask", "16:32", {"kind": "w4"}),
    ("bitmask", "70%", {"kind": "w4"}),
    ("bitmask", "60%/row", {"kind": "w8"}),
    ("gqs", "g128@50%", {"kind": "w2"}),
    ("gqs", "g128@25%/row", {"kind": "w3"}),
    ("gqs", "g32@50%", {"kind": "w4a8"}),
)
"""The layers of ``coded``, in turn. Its K is 64 and 160: blocks of 64 columns and groups of 128 end in the middle."""

EXPERTS: tuple[Layer, ...] = (
    ("bitmask", "2:4", {"kind": "w4"}),
    ("gqs", "g16@50%", {}),
    ("bitmask", "32:64", {}),
    ("gqs", "g8@25%", {"kind": "w3"}),
)
"""The layers of ``experts``, in turn."""

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 4, "head_dim": 16}

BLAKE2B = "0" * 32
"""A digest as long as those of earlier builds: `SemisparseConfig.renew_digests` computes it anew by BLAKE2b."""


def packed_model(model: PreTrainedModel, chosen: Sequence[Layer]) -> PreTrainedModel:
    """Pack the linear layers of a model's decoder as ``chosen``, in turn; every second one has BLAKE2b digests.

    Args:
        model: dense; is changed.
        chosen: formats, patterns and options.
    """
    split_experts(model)
    names = [name for name, module in model.named_modules() if is_linear(module) and "layers" in name]
    entries = {}
    for index, name in enumerate(names):
        form, pattern, options = chosen[index % len(chosen)]
        weight = weight_of(model.get_submodule(name)).clone()
        weight *= parse_pattern(pattern).mask(weight.abs().float())
        packed = pack_for_disk(weight, form, pattern, **options)
        replace_linear(model, name, packed)
        digests = {"any": BLAKE2B} if index % 2 else {}
        entries[name] = packed.spec.to_dict() | {
            "density": 0.5,
            "error": None,
            "outcome": "compressed",
            "digests": digests,
        }
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "recipe": {}, "layers": entries})
    return model


def write_whole(path: Path) -> None:
    packed_model(random_model("llama", num_hidden_layers=1), PACKED[::2]).save_pretrained(path)


def write_sharded(path: Path) -> None:
    """Write a model in several files."""
    packed_model(random_model("llama", num_hidden_layers=1), PACKED[1::2]).save_pretrained(path, max_shard_size=10_000)
    assert len(list(path.glob("*.safetensors"))) > 2


def write_coded(path: Path) -> None:
    packed_model(random_model("llama", num_hidden_layers=1, **SIZES), CODED).save_pretrained(path)


def write_experts(path: Path) -> None:
    packed_model(tiny_model("Mixtral", torch.bfloat16, num_hidden_layers=1), EXPERTS).save_pretrained(path)


def write_packed_integers(path: Path) -> None:
    """Write 4-bit codes with zero points in groups of 32, as the package compressed-tensors does."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    foreign.compressed_tensors(path, _dense_model(), weights, format="pack-quantized")


def write_mxfp4(path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    foreign.mxfp4(path, tiny_model("GPT-OSS", torch.bfloat16, **sizes))


SOURCES: dict[str, Callable[[Path], object]] = {
    "whole": write_whole,
    "sharded": write_sharded,
    "coded": write_coded,
    "experts": write_experts,
    "gptq": lambda path: foreign.gptq(path, _dense_model(), bits=3, order=True),
    "awq": lambda path: foreign.awq(path, _dense_model()),
    "fp8": lambda path: foreign.fp8(path, _dense_model(), (32, 32)),
    "int8": lambda path: foreign.int8(path, _dense_model()),
    "packed-integers": write_packed_integers,
    "mxfp4": write_mxfp4,
}
"""What writes each directory, by name."""

FOREIGN = ("gptq", "awq", "fp8", "int8", "packed-integers", "mxfp4")
"""Directories that other tools quantised."""


def write_directory(name: str, root: Path) -> Path:
    """Write a directory of `SOURCES` below ``root``, with the same bytes each time, and return it."""
    torch.manual_seed(0)
    SOURCES[name](root / name)
    return root / name


def _dense_model() -> PreTrainedModel:
    return random_model("llama", torch.float16, num_hidden_layers=1, **foreign.SIZES)
