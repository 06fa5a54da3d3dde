"""Reading untrusted directories, and writing directories atomically."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from semisparse.checkpoint import atomic_directory, open_directory
from semisparse.errors import CheckpointError, InputError, SemisparseError
from tests.models import random_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_dense_directory_opens(directory: Path):
    opened = open_directory(directory)
    assert opened.layers == {}
    header = opened.headers["model.layers.0.mlp.up_proj.weight"]
    assert (header.dtype, header.shape, header.nbytes) == (torch.bfloat16, (44, 24), 44 * 24 * 2)
    assert opened.read("model.layers.0.mlp.up_proj.weight").shape == (44, 24)


def test_an_unreadable_file_is_said_to_be_unreadable(directory: Path, monkeypatch: pytest.MonkeyPatch):
    opened = Path.open

    def open_others(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.suffix == ".safetensors":  # root may read every file
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_others)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is unreadable: Permission denied"):
        open_directory(directory)


def spoil_truncate(d: Path) -> None:
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_pickle(d: Path) -> None:
    (d / "model.safetensors").unlink()
    torch.save({}, d / "pytorch_model.bin")


def spoil_disguised_pickle(d: Path) -> None:
    torch.save({}, d / "model.safetensors")


def spoil_index(d: Path) -> None:
    (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))


def spoil_index_outside(d: Path) -> None:
    """A file name that leads out of the directory is refused, also if the directory holds a file of that base name."""
    save_file({"a": torch.zeros(1)}, d.parent / "outside.safetensors")
    save_file({"a": torch.zeros(1)}, d / "outside.safetensors")
    (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is unreadable"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: (d / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "truncated or not a safetensors file"),
        (spoil_truncate, "truncated or not a safetensors file"),
        (spoil_pickle, "a pickle; semisparse reads safetensors only"),
        (spoil_disguised_pickle, "truncated or not a safetensors file"),
        (spoil_index, "model-00002.safetensors is missing"),
        (spoil_index_outside, "expected a file of the directory itself"),
    ],
)
def test_a_broken_directory_is_refused_with_a_sentence(directory: Path, spoil, sentence: str):
    spoil(directory)
    with pytest.raises(CheckpointError, match=sentence):
        open_directory(directory)


def test_a_missing_directory_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no model directory at"):
        open_directory(tmp_path / "nothing")


def test_a_file_is_called_one(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"no model directory at .*model.safetensors, which is a file"):
        open_directory(tmp_path / "model.safetensors")


def test_a_directory_of_the_hub_s_cache_or_of_gguf_files_is_known(directory: Path, tmp_path: Path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(directory, snapshot)
    with pytest.raises(CheckpointError, match=f"of the Hugging Face cache; the model's directory is {snapshot}"):
        open_directory(tmp_path / "models--a--b")
    (tmp_path / "llama.gguf").touch()
    with pytest.raises(CheckpointError, match=r"holds llama.gguf, but no config.json; .*gguf_file=NAME"):
        open_directory(tmp_path)


def test_a_directory_appears_at_once(tmp_path: Path):
    with atomic_directory(tmp_path / "a" / "out") as scratch:
        (scratch / "file").write_text("text")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "text"
    assert os.listdir(tmp_path / "a") == ["out"]


def test_files_are_readable_by_whom_the_umask_lets(tmp_path: Path):
    """safetensors writes files that only their owner can read; another user may serve the model."""
    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "out") as scratch:
            (scratch / "folder").mkdir()
            for file in (scratch / "weights", scratch / "folder" / "more"):
                file.touch(0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {"weights": 0o640, "folder": 0o750, "more": 0o640}


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    def write_on_a_full_disk() -> None:
        with atomic_directory(tmp_path / "out") as scratch:
            (scratch / "file").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SemisparseError, match="No space left on device"):
        write_on_a_full_disk()
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_is_not_overwritten(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(InputError, match="exists already"), atomic_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "mine").read_text() == "keep"


@pytest.mark.parametrize("name", ["n" * 255, "日" * 85], ids=["ascii", "wide"])
def test_a_name_as_long_as_any(tmp_path: Path, name: str):
    """The temporary directory, which has eight random characters more, has a shorter one."""
    with atomic_directory(tmp_path / name) as scratch:
        (scratch / "file").touch()
    assert os.listdir(tmp_path) == [name]
