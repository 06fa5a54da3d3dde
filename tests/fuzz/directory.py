"""A small compressed directory with layers of every format, and a directory taken apart so that it can be mutated."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from semisparse.api.packing import pack_for_disk
from semisparse.integrations.transformers import mark_compressed
from semisparse.nn import replace_linear, weight_of
from semisparse.patterns import parse_pattern
from tests.models import random_model

PACKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
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
"""Format, pattern and pack options of each layer in turn."""


def small_model(chosen: Sequence[tuple[str, str, dict[str, Any]]]) -> PreTrainedModel:
    """Return a model of one decoder layer, its seven linear layers packed as ``chosen``."""
    model = random_model("llama", num_hidden_layers=1)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    entries = {}
    for name, (form, pattern, options) in zip(names, chosen, strict=True):
        weight = weight_of(model.get_submodule(name)).clone()
        weight *= parse_pattern(pattern).mask(weight.abs().float())
        packed = pack_for_disk(weight, form, pattern, **options)
        replace_linear(model, name, packed)
        entries[name] = packed.spec.to_dict() | {"density": 0.5, "error": None, "outcome": "compressed", "digests": {}}
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "recipe": {}, "layers": entries})
    return model


def write_directories(root: Path) -> list[Path]:
    """Write two models, the second in several files, and return their directories."""
    small_model(PACKED[::2]).save_pretrained(root / "whole")
    small_model(PACKED[1::2]).save_pretrained(root / "sharded", max_shard_size=10_000)
    assert len(list((root / "sharded").glob("*.safetensors"))) > 2
    return [root / "whole", root / "sharded"]


@dataclass
class Shard:
    """A safetensors file: its header, with an entry per tensor, and the bytes behind it."""

    header: dict[str, Any]
    data: bytearray

    @staticmethod
    def read(file: Path) -> Shard:
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        return Shard(json.loads(content[8 : 8 + length]), bytearray(content[8 + length :]))

    def write(self, file: Path) -> None:
        header = json.dumps(self.header).encode()
        header += b" " * (-len(header) % 8)
        file.write_bytes(struct.pack("<Q", len(header)) + header + self.data)

    def names(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]

    def resize(self, name: str, dtype: str, shape: list[int], content: bytes) -> None:
        """Give a tensor another dtype, shape and content; the tensors behind it move."""
        begin, end = self.header[name]["data_offsets"]
        self.data[begin:end] = content
        grown = begin + len(content) - end
        for other in self.names():
            if other != name and self.header[other]["data_offsets"][0] >= end:
                self.header[other]["data_offsets"] = [at + grown for at in self.header[other]["data_offsets"]]
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}


@dataclass
class Directory:
    """A model directory in memory. Mutations of whole files are applied last, from ``later``."""

    config: dict[str, Any]
    shards: dict[str, Shard]
    index: dict[str, Any] | None
    later: list[Any] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> Directory:
        index = path / "model.safetensors.index.json"
        return Directory(
            json.loads((path / "config.json").read_text()),
            {file.name: Shard.read(file) for file in sorted(path.glob("*.safetensors"))},
            json.loads(index.read_text()) if index.exists() else None,
        )

    def write(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            (path / "model.safetensors.index.json").write_text(json.dumps(self.index))
        for name, shard in self.shards.items():
            shard.write(path / name)
        for change in self.later:
            change(path)

    @property
    def entries(self) -> dict[str, Any]:
        return self.config["quantization_config"]["layers"]

    def shard_of(self, tensor: str) -> Shard | None:
        return next((shard for shard in self.shards.values() if tensor in shard.header), None)
