"""Finished pieces of a compression, kept on disk so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport
from semisparse.errors import InputError
from semisparse.quant.group import GroupScales
from semisparse.version import __version__


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
        "versions": f"semisparse {__version__} torch {torch.__version__} transformers {transformers.__version__}",
    }


class Journal:
    """A directory of finished work, each piece a safetensors file and a JSON file with a checksum of both.

    A piece's JSON file is written last, and every file appears whole or not at all, so a piece whose JSON file is
    there is finished. Used by one run at a time.

    Args:
        directory: made if absent.
        fingerprint: as `fingerprint` gives it.

    Raises:
        InputError: the directory holds the work of a run with another fingerprint.
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
        found = self.recall("block", index)
        if found is None:
            return None
        tensors, layers = found
        return tensors, [read_report(layer, tensors, layer["name"]) for layer in layers]

    def save(self, index: int, weights: Mapping[str, Tensor], reports: Sequence[LayerReport]) -> None:
        """Keep a finished block: its weights by name ([N, K]) and its reports."""
        tensors = dict(weights)
        notes = [note_report(report, tensors, report.name) for report in reports]
        self.keep("block", index, tensors, notes)

    def recall(self, part: str, index: int) -> tuple[dict[str, Tensor], Any] | None:
        """Give what was kept of a part of the work; None if that was nothing or is damaged."""
        notes_path, tensors_path = self._paths(part, index)
        if not notes_path.exists():
            return None
        try:
            entry = json.loads(notes_path.read_bytes())
            content = tensors_path.read_bytes()
            if entry["checksum"] != _checksum(content, entry["notes"]):
                raise ValueError("its checksum does not match")
            return safetensors.torch.load(content), entry["notes"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(
                f"{part} {index} of the interrupted run in {self._directory} is damaged ({error}); "
                "it is computed again",
                stacklevel=2,
            )
            return None

    def keep(self, part: str, index: int, tensors: Mapping[str, Tensor], notes: Any) -> None:
        """Keep a finished piece of a part of the work: tensors by name, and notes of JSON values."""
        notes_path, tensors_path = self._paths(part, index)
        content = safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
        _write(tensors_path, content)
        _write(notes_path, json.dumps({"checksum": _checksum(content, notes), "notes": notes}).encode())

    def _paths(self, part: str, index: int) -> tuple[Path, Path]:
        stem = self._directory / f"{part}-{index:04d}"
        return stem.with_suffix(".json"), stem.with_suffix(".safetensors")

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


def note_report(report: LayerReport, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Write a report as JSON values, and its tensors among others under names that begin with ``key``."""
    scales = report.scales
    if scales:
        tensors |= {f"{key} scale": scales.scale, f"{key} zero": scales.zero}
    rounding = {"bits": scales.bits, "size": scales.size} if scales else None
    return {**asdict(replace(report, scales=None)), "scales": rounding}


def read_report(notes: Mapping[str, Any], tensors: dict[str, Tensor], key: str) -> LayerReport:
    """Read what `note_report` wrote, and take its tensors out."""
    scales = None
    if notes["scales"]:
        scale, zero = (tensors.pop(f"{key} {part}") for part in ("scale", "zero"))
        scales = GroupScales(**notes["scales"], scale=scale, zero=zero)
    return LayerReport(**{**notes, "scales": scales})


def _checksum(content: bytes, notes: Any) -> str:
    return hashlib.sha256(content + json.dumps(notes, sort_keys=True).encode()).hexdigest()


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
