"""Reading an untrusted model directory. Files and declarations are checked before any tensor is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from semisparse.checkpoint.block import read_block
from semisparse.checkpoint.config import check_sizes, read_json
from semisparse.checkpoint.file_layers import StoredTensor
from semisparse.checkpoint.files import refuse_adapter, require_directory, weight_files
from semisparse.errors import CheckpointError
from semisparse.formats.base import Packed

_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Header:
    """One tensor's entry in a safetensors header.

    Args:
        file: the safetensors file.
        dtype: None if torch has no such dtype.
        shape: the tensor's shape.
        nbytes: the tensor's size in bytes; 0 if ``dtype`` is None.
    """

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ModelDirectory:
    """A model directory with a readable config.json and complete safetensors files.

    Args:
        path: the directory.
        config: the content of config.json.
        headers: the header entry of every stored tensor, by tensor name.
        layers: the compressed layers by module name, with tensors on the meta device; empty for a dense model.
    """

    path: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    layers: dict[str, Packed]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors whose dtype torch has."""
        return sum(header.nbytes for header in self.headers.values())

    def read(self, name: str) -> Tensor:
        """Read the tensor ``name``."""
        with safe_open(self.headers[name].file, "pt") as file:
            return file.get_tensor(name)

    def packed(self, name: str, stored: Mapping[str, StoredTensor] | None = None) -> Packed:
        """Return the compressed layer ``name``, without validating it.

        Args:
            name: the layer's module name.
            stored: its tensors by their names in the files; by default they are read.
        """
        tensors = {}
        for tensor in self.layers[name].tensors:
            full = f"{name}.{tensor}"
            tensors[tensor] = self.read(full) if stored is None else self.tensor(full, stored)
        return Packed(self.layers[name].spec, tensors)

    def tensor(self, name: str, stored: Mapping[str, StoredTensor]) -> Tensor:
        """Return a tensor on the memory that its bytes were read into.

        Raises:
            CheckpointError: the file was written since its header was read.
        """
        header, data = self.headers[name], stored[name].data if name in stored else b""
        if header.dtype is None or len(data) != header.nbytes:
            raise CheckpointError(f"{header.file} was changed while it was read: tensor {name} has {len(data)} bytes")
        if not data:
            return torch.empty(header.shape, dtype=header.dtype)
        return torch.frombuffer(data, dtype=header.dtype).reshape(header.shape)


def open_directory(path: str | Path) -> ModelDirectory:
    """Open a model directory, dense or compressed. Reads only JSON files and safetensors headers.

    Raises:
        CheckpointError: the directory is missing or incomplete, a file is truncated or not safetensors, or a tensor
            has another dtype or shape than config.json declares.
    """
    directory = open_files(path)
    block = directory.config.get("quantization_config")
    layers = {} if block is None else read_block(block)
    check_headers(layers, directory.headers)
    return replace(directory, layers=layers)


def open_files(path: str | Path) -> ModelDirectory:
    """Open a model directory whatever its ``quantization_config`` says; ``layers`` is empty.

    Raises:
        CheckpointError: the directory is missing or incomplete, a file is truncated or not safetensors, or config.json
            claims sizes that no model has.
    """
    path = Path(path)
    require_directory(path)
    refuse_adapter(path)
    config = read_json(path / "config.json")
    check_sizes(config, path)
    return ModelDirectory(path, config, read_headers(weight_files(path)), {})


def check_headers(layers: Mapping[str, Packed], headers: Mapping[str, Header]) -> None:
    """Check that the files contain every tensor that config.json declares, with its dtype and shape.

    Args:
        layers: the compressed layers, as `read_block` returns them.
        headers: the header entry of every stored tensor, by tensor name.
    Raises:
        CheckpointError: a tensor is missing or has another dtype or shape.
    """
    for layer, packed in layers.items():
        for tensor, expected in packed.tensors.items():
            header = headers.get(f"{layer}.{tensor}")
            if header is None:
                raise CheckpointError(f"tensor {layer}.{tensor} is missing from the safetensors files")
            if header.dtype != expected.dtype or header.shape != tuple(expected.shape):
                raise CheckpointError(
                    f"tensor {layer}.{tensor} is {header.dtype} {list(header.shape)}, "
                    f"config.json declares {expected.dtype} {list(expected.shape)}"
                )


def read_headers(files: list[Path]) -> dict[str, Header]:
    """Return the header entry of every tensor in safetensors files, by tensor name. No tensor is read.

    Raises:
        CheckpointError: a file is missing, truncated or not safetensors.
    """
    headers: dict[str, Header] = {}
    with ExitStack() as stack:
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            try:
                file.open("rb").close()
            except OSError as error:  # safe_open would report a file that cannot be opened as missing
                raise CheckpointError(f"{file} is unreadable: {error.strerror}") from error
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            except (
                SafetensorError,
                OSError,
                MemoryError,
                RuntimeError,
            ) as error:  # torch's, of 2^40 bytes that it cannot map
                raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from error
            for name in opened.keys():  # noqa: SIM118, it is no dict
                part = opened.get_slice(name)
                dtype, shape = _SAFETENSORS_DTYPES.get(part.get_dtype()), tuple(part.get_shape())
                size = torch.Size(shape).numel() * (dtype.itemsize if dtype else 0)
                headers[name] = Header(file, dtype, shape, size)
    return headers
