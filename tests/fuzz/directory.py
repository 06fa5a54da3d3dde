"""A model directory taken apart, so that it can be mutated and written again."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    """A model directory in memory.

    Args:
        config: the content of config.json.
        shards: the safetensors files by name.
        index: the content of the index; None if there is none.
        tokenizer: the tokenizer's files by name.
        later: changes of whole files, each called with the directory once it is written.
    """

    config: dict[str, Any]
    shards: dict[str, Shard]
    index: dict[str, Any] | None
    tokenizer: dict[str, bytes] = field(default_factory=dict)
    later: list[Any] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> Directory:
        index = path / "model.safetensors.index.json"
        return Directory(
            json.loads((path / "config.json").read_text()),
            {file.name: Shard.read(file) for file in sorted(path.glob("*.safetensors"))},
            json.loads(index.read_text()) if index.exists() else None,
            {file.name: file.read_bytes() for file in path.glob("tokenizer*")},
        )

    def write(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            (path / "model.safetensors.index.json").write_text(json.dumps(self.index))
        for name, shard in self.shards.items():
            shard.write(path / name)
        for name, content in self.tokenizer.items():
            (path / name).write_bytes(content)
        for change in self.later:
            change(path)

    @property
    def entries(self) -> dict[str, Any]:
        return self.config["quantization_config"]["layers"]

    def shard_of(self, tensor: str) -> Shard | None:
        return next((shard for shard in self.shards.values() if tensor in shard.header), None)
