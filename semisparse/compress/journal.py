"""Finished blocks of a compression, kept on disk so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport
from semisparse.errors import InputError


def fingerprint(
    model: nn.Module, batches: Sequence[Tensor], recipe: Recipe, *, seed: int, device: torch.device | str
) -> dict[str, str]:
    """Name everything that decides a compression's result, for `Journal`; take it before the model is changed.

    Args:
        batches: calibration token ids.
    """
    weights, tokens = hashlib.sha256(), hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(_bytes(tensor))
    for batch in batches:
        tokens.update(f"{tuple(batch.shape)}".encode())
        tokens.update(_bytes(batch))
    return {
        "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
        "model weights": weights.hexdigest(),
        "calibration tokens": tokens.hexdigest(),
        "seed": str(seed),
        "device": torch.device(device).type,
        "versions": " ".join(f"{name} {version(name)}" for name in ("semisparse", "torch", "transformers")),
    }


class Journal:
    """A directory of finished blocks, each a safetensors file of weights and a JSON file of reports with a checksum.

    A block's JSON file is written last, and every file appears whole or not at all, so a block whose JSON file is
    there is finished. Used by one run at a time.

    Args:
        directory: made if absent.
        fingerprint: as `fingerprint` gives it.

    Raises:
        InputError: the directory holds the blocks of a run with another fingerprint.
    """

    def __init__(self, directory: str | Path, fingerprint: Mapping[str, str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "fingerprint.json"
        if path.exists():
            self._require_same(path, fingerprint)
        else:
            _write(path, json.dumps(dict(fingerprint), indent=1).encode())

    def load(self, index: int) -> tuple[dict[str, Tensor], list[LayerReport]] | None:
        """Give a block's weights by name ([N, K]) and its reports; None if it is not finished or is damaged."""
        if not self._reports(index).exists():
            return None
        try:
            entry = json.loads(self._reports(index).read_bytes())
            content = self._weights(index).read_bytes()
            if entry["checksum"] != _checksum(content, entry["layers"]):
                raise ValueError("its checksum does not match")
            return safetensors.torch.load(content), [LayerReport(**layer) for layer in entry["layers"]]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(
                f"block {index} of the interrupted run in {self._directory} is damaged ({error}); it is computed again",
                stacklevel=2,
            )
            return None

    def save(self, index: int, weights: Mapping[str, Tensor], reports: Sequence[LayerReport]) -> None:
        """Keep a finished block: its weights by name ([N, K]) and its reports."""
        content = safetensors.torch.save({name: weight.contiguous().cpu() for name, weight in weights.items()})
        layers = [asdict(report) for report in reports]
        _write(self._weights(index), content)
        _write(self._reports(index), json.dumps({"checksum": _checksum(content, layers), "layers": layers}).encode())

    def _weights(self, index: int) -> Path:
        return self._directory / f"block-{index:04d}.safetensors"

    def _reports(self, index: int) -> Path:
        return self._directory / f"block-{index:04d}.json"

    def _require_same(self, path: Path, fingerprint: Mapping[str, str]) -> None:
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is not readable; remove {self._directory} to start again") from error
        different = [
            key for key, value in fingerprint.items() if not isinstance(found, dict) or found.get(key) != value
        ]
        if different:
            raise InputError(
                f"the interrupted run in {self._directory} had another {', another '.join(different)}; "
                "repeat it with the same, or remove the directory to start again"
            )


def _checksum(content: bytes, layers: Sequence[Mapping[str, object]]) -> str:
    return hashlib.sha256(content + json.dumps(layers, sort_keys=True).encode()).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the process or the machine stops."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
