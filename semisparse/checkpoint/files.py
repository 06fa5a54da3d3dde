"""The files of an untrusted model directory. This module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from semisparse.checkpoint.config import read_json
from semisparse.errors import CheckpointError

MAX_FILE_NAME = 255
"""Maximum bytes of a file name on all usual file systems."""

ADAPTER = "adapter_config.json"
"""The file that makes a directory a PEFT adapter's."""

READ_AHEAD = 1 << 26
"""Bytes that `read_ahead` asks for at a time."""

SUFFIXES = frozenset((".json", ".jinja", ".txt", ".model", ".safetensors"))
"""Of the files that transformers and tokenizers may read."""


def require_directory(path: Path) -> None:
    """Refuse a path that is no directory, and one with devices, pipes or sockets in the place of files.

    Raises:
        CheckpointError: names the file, or says how to download a model from the Hugging Face Hub.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"no model directory at {path}{', which is a file' if path.is_file() else ''}; `hf download NAME "
            "--local-dir DIR` fetches one from the Hugging Face Hub"
        )
    if not (path / "config.json").exists():
        _explain(path)
    for file in path.iterdir():
        if file.suffix in SUFFIXES and file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file} is no regular file")


def _explain(path: Path) -> None:
    """Raise an error for a directory without config.json whose kind is known.

    Raises:
        CheckpointError: says what to give instead.
    """
    snapshots = sorted(path.glob("snapshots/*/config.json"))
    if snapshots:
        raise CheckpointError(f"{path} is of the Hugging Face cache; the model's directory is {snapshots[-1].parent}")
    other = sorted(path.glob("*.gguf"))
    if other:
        raise CheckpointError(
            f"{path} holds {other[0].name}, but no config.json; semisparse reads safetensors as transformers writes "
            "them: load the file with from_pretrained(..., gguf_file=NAME) and save the model with save_pretrained"
        )


def refuse_adapter(path: Path) -> None:
    """Refuse a directory with a PEFT adapter, which may not exist.

    Where PEFT is installed, transformers puts the adapter onto the model, or loads the model that the adapter names
    instead of the directory's, wherever that is. Neither is checked.

    Raises:
        CheckpointError: says what to do.
    """
    if (path / ADAPTER).exists():
        raise CheckpointError(
            f"{path} holds {ADAPTER}, with which transformers loads other weights than the directory's: merge the "
            "adapter (`merge_and_unload`) and save the model, or remove the file"
        )


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory, which may not exist.

    Raises:
        CheckpointError: there are none, or the index is unreadable or names something other than files beside it.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        return sorted({path / _file_inside(index, file) for file in weight_map.values()})
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if pickles:
        raise CheckpointError(
            f"{path} holds {pickles[0]}, a pickle; semisparse reads safetensors only, because a pickle can run code: "
            "convert it with transformers' save_pretrained"
        )
    raise CheckpointError(f"{path} holds no model.safetensors")


def read_ahead(files: Iterable[Path], stopped: Event | None = None) -> None:
    """Start reading files into the page cache in the background, on systems with ``posix_fadvise``.

    Without it, validating the weights waits for the disk page by page.

    Args:
        files: in the order in which they are read.
        stopped: no more is read once it is set.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            for at in range(0, os.fstat(opened.fileno()).st_size, READ_AHEAD):
                if stopped is not None and stopped.is_set():
                    return
                os.posix_fadvise(opened.fileno(), at, READ_AHEAD, os.POSIX_FADV_WILLNEED)


def read_ahead_in_background(path: Path) -> Thread:
    """Start `read_ahead` of a model directory's weights in a thread, and return the thread.

    Nothing is said about errors: whoever loads the directory meets them, too, and reports them.
    """

    def read() -> None:
        with suppress(CheckpointError, OSError):
            read_ahead(weight_files(path))

    thread = Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    return thread


def _file_inside(index: Path, name: Any) -> str:
    """Return the file that an index names.

    Raises:
        CheckpointError: the name is a path, which could lead out of the directory, or no file can have it.
    """
    plain = isinstance(name, str) and name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\")
    if not plain or len(name.encode()) > MAX_FILE_NAME:
        raise CheckpointError(f"{index} names the file {str(name)[:99]!r}, expected a file of the directory itself")
    return name
