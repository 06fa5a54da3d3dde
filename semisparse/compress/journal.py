"""The journal of a compression: finished pieces of work on disk, from which an interrupted run is resumed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from semisparse import __version__
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport
from semisparse.errors import InputError, SemisparseError
from semisparse.quant.group import GroupScales

FINGERPRINT = "fingerprint.json"
"""The file of a journal that identifies its run."""

PARTS = "parts of the sums"
"""The key of `Ranks.parts` in a fingerprint."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors files."""


def weights_digest(model: nn.Module) -> str:
    """Return a digest of a model's weights."""
    weights, state = hashlib.sha256(), model.state_dict()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a core hashes some 1.5 GB/s
        for (name, tensor), digest in zip(state.items(), pool.map(_digest, state.values()), strict=True):
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + digest)
    return weights.hexdigest()


def fingerprint(batches: Sequence[Tensor], recipe: Recipe, *, seed: int, device: torch.device | str) -> dict[str, str]:
    """Return, by name, what determines the result of a compression in addition to the model's weights, for `Journal`.

    Args:
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: of the compression.
        seed: of the compression.
        device: where the compression computes; only its type (cpu or cuda) is compared.
    """
    tokens = hashlib.sha256()
    for batch in batches:
        tokens.update(f"{tuple(batch.shape)}".encode())
        tokens.update(_bytes(batch))
    return {
        "recipe": json.dumps(recipe.to_dict(), sort_keys=True),
        "calibration tokens": tokens.hexdigest(),
        "seed": str(seed),
        "device": torch.device(device).type,
        "versions": f"semisparse {__version__} torch {torch.__version__} transformers {transformers.__version__}",
    }


class Journal:
    """A directory of finished pieces of work, for one run at a time.

    A piece is a safetensors file and a JSON file with a checksum of both. Files are written atomically, the JSON file
    last: a piece whose JSON file exists is finished.

    Args:
        directory: created if absent.
        fingerprint: of the run: `fingerprint`, `weights_digest` and whatever else determines its bytes.

    Raises:
        InputError: the directory holds the work of a run with another fingerprint.
    """

    def __init__(self, directory: str | Path, fingerprint: Mapping[str, str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / FINGERPRINT
        if path.exists():
            self._require_same(path, fingerprint)
        else:
            _write(path, [json.dumps(dict(fingerprint), indent=1).encode()])

    def load_layer(self, index: int) -> tuple[dict[str, Tensor], list[LayerReport]] | None:
        """Load the weights ([N, K], by name) and reports of a decoder layer; None if they are absent or damaged."""
        piece = self.load("block", index)
        if piece is None:
            return None
        tensors, notes = piece
        return tensors, [report_from_json(note, tensors, note["name"]) for note in notes]

    def save_layer(self, index: int, weights: Mapping[str, Tensor], reports: Sequence[LayerReport]) -> None:
        """Save the weights ([N, K], by name) and reports of a finished decoder layer."""
        tensors = dict(weights)
        notes = [report_to_json(report, tensors, report.name) for report in reports]
        self.save("block", index, tensors, notes)

    def load(
        self, part: str, index: int, wanted: Callable[[Any], bool] = lambda notes: True
    ) -> tuple[dict[str, Tensor], Any] | None:
        """Load piece ``index`` of a part of the work: tensors by name and notes.

        None if it is absent or damaged, or if its notes are not ``wanted``: then its file, which may be large, is not
        read. The tensors are those of the file, mapped into memory.
        """
        notes_path, tensors_path = self._paths(part, index)
        if not notes_path.exists():
            return None
        try:
            entry = json.loads(notes_path.read_bytes())
            if not wanted(entry["notes"]):
                return None
            with tensors_path.open("rb") as file:
                if entry["checksum"] != _checksum(iter(partial(file.read, 1 << 24), b""), entry["notes"]):
                    raise ValueError("its checksum does not match")
            return safetensors.torch.load_file(tensors_path), entry["notes"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(
                f"{notes_path.stem} of the interrupted run in {self._directory} is damaged ({error}); "
                "it is computed again",
                stacklevel=2,
            )
            return None

    def save(self, part: str, index: int, tensors: Mapping[str, Tensor], notes: Any) -> None:
        """Save a finished piece of a part of the work: tensors by name, and notes that are JSON values."""
        notes_path, tensors_path = self._paths(part, index)
        content = _safetensors(tensors)
        with ThreadPoolExecutor(1) as pool:  # a decoder layer takes as long to hash as to write
            checksum = pool.submit(_checksum, content, notes)
            _write(tensors_path, content)
        _write(notes_path, [json.dumps({"checksum": checksum.result(), "notes": notes}).encode()])

    def written(self, part: str, index: int) -> tuple[dict[str, Tensor], Any]:
        """Return a piece that this process has written, mapped into memory; its checksum is not compared again.

        Raises:
            SemisparseError: it cannot be read.
        """
        notes_path, tensors_path = self._paths(part, index)
        try:
            return safetensors.torch.load_file(tensors_path), json.loads(notes_path.read_bytes())["notes"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise SemisparseError(f"{tensors_path} was written and cannot be read again: {error}") from error

    def _paths(self, part: str, index: int) -> tuple[Path, Path]:
        stem = self._directory / f"{part}-{index:04d}"
        return stem.with_suffix(".json"), stem.with_suffix(".safetensors")

    def _require_same(self, path: Path, fingerprint: Mapping[str, str]) -> None:
        try:
            previous = json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is not readable; remove {self._directory} to start again") from error
        different = [
            key for key, value in fingerprint.items() if not isinstance(previous, dict) or previous.get(key) != value
        ]
        if different:
            raise InputError(
                f"the interrupted run in {self._directory} differs in: {', '.join(different)}; "
                "repeat it with the same inputs, or remove the directory to start again"
            )


def open_journal(directory: Path, fingerprint: Mapping[str, str], ranks: Ranks) -> Journal:
    """Return the journal in a directory, on every rank; the first one makes it.

    Raises:
        InputError: as `Journal`, or a rank does not see the directory.
    """
    ranks.first(lambda: Journal(directory, fingerprint) and None)
    if not (directory / FINGERPRINT).exists():
        raise InputError(
            f"this host does not see {directory}, which rank 0 has made; --out must be on a file system that all ranks "
            "share"
        )
    return Journal(directory, fingerprint)


class SharedJournal(Journal):
    """A journal whose files every rank reads and the first rank writes. All ranks call the same methods in one order.

    Args:
        journal: of this rank.
        ranks: the processes.
    """

    def __init__(self, journal: Journal, ranks: Ranks) -> None:
        self._directory, self._ranks = journal._directory, ranks

    def load(
        self, part: str, index: int, wanted: Callable[[Any], bool] = lambda notes: True
    ) -> tuple[dict[str, Tensor], Any] | None:
        """Load a piece; the first rank checks it."""
        pieces: list[Any] = []

        def check() -> tuple[Any] | None:
            pieces.append(Journal.load(self, part, index, wanted))
            return None if pieces[0] is None else (pieces[0][1],)

        notes = self._ranks.first(check)
        if notes is None or pieces:
            return pieces[0] if pieces else None
        return safetensors.torch.load_file(self._paths(part, index)[1]), notes[0]

    def save(self, part: str, index: int, tensors: Mapping[str, Tensor], notes: Any) -> None:
        """Save a piece on the first rank."""
        if self._ranks.is_first:
            super().save(part, index, tensors, notes)


def recorded_parts(directory: Path) -> int | None:
    """Return in how many parts the run of a directory's journal takes its sums (`Ranks.parts`); None without a run."""
    try:
        return int(json.loads((directory / FINGERPRINT).read_bytes())[PARTS])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is no run, or the file is unreadable: `Journal` says which


def report_to_json(report: LayerReport, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Return a report as JSON values, and add its tensors to ``tensors`` under names that begin with ``key``."""
    scales = report.scales
    if scales:
        tensors |= {f"{key} scale": scales.scale, f"{key} zero": scales.zero}
    settings = {"bits": scales.bits, "size": scales.size, "symmetric": scales.symmetric} if scales else None
    return {**asdict(replace(report, scales=None)), "scales": settings}


def report_from_json(notes: Mapping[str, Any], tensors: dict[str, Tensor], key: str) -> LayerReport:
    """Return the report that `report_to_json` wrote, and remove its tensors from ``tensors``."""
    scales = None
    if notes["scales"]:
        scale, zero = (tensors.pop(f"{key} {part}") for part in ("scale", "zero"))
        scales = GroupScales(**notes["scales"], scale=scale, zero=zero)
    return LayerReport(**{**notes, "scales": scales})


def _safetensors(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file: the header, and tensors as they are in memory.

    `safetensors.torch.save` copies them twice and holds Python's lock meanwhile, so that the next decoder layer waits.
    """
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        return [safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})]
    header, parts, end = dict[str, Any](), list[bytes | memoryview](), 0
    # The widest numbers first: then each tensor begins at a multiple of its numbers' size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(_bytes(tensor))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def _checksum(content: Iterable[bytes | memoryview], notes: Any) -> str:
    checksum = hashlib.sha256()
    for part in content:
        checksum.update(part)
    checksum.update(json.dumps(notes, sort_keys=True).encode())
    return checksum.hexdigest()


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(_bytes(tensor)).digest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write a file atomically and durably: whenever the process or the machine stops, it is whole or absent."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            for part in content:
                file.write(part)
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
