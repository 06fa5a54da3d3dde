"""Digests computed from the files, before torch is imported, are those of the tensors; a hostile file stops nothing."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from safetensors.torch import load_file

from semisparse.api import inspect_directory
from semisparse.checkpoint import file_digests
from semisparse.checkpoint.file_digests import FileDigests
from semisparse.errors import CheckpointError
from tests.fuzz.sources import write_directory


def expected_digests(path: Path) -> dict[str, str]:
    """Return the digest of each tensor that has one in config.json, of the kind that it has there."""
    layers = json.loads((path / "config.json").read_text())["quantization_config"]["layers"]
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = {}
    for layer, entry in layers.items():
        for tensor, digest in entry["digests"].items():
            octets = tensors[f"{layer}.{tensor}"].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            blake = hashlib.blake2b(octets, digest_size=16).hexdigest()
            found[f"{layer}.{tensor}"] = blake if len(digest) == 32 else hashlib.sha256(octets).hexdigest()
    return found


@pytest.mark.parametrize("source", ["whole", "sharded", "experts"])
def test_digests_are_those_of_the_tensors(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_digests, "PIECE", 100)
    path = write_directory(source, tmp_path)
    expected, digests = expected_digests(path), FileDigests(path)
    assert {len(digest) for digest in expected.values()} == {32, 64}
    assert {name: digests.get(name) for name in expected} == expected
    assert digests.get("lm_head.weight") is None
    digests.stop()


def test_no_torch_is_imported(tmp_path: Path):
    code = "import sys; from semisparse.checkpoint.file_digests import FileDigests as F; F(sys.argv[1]).stop(); "
    code += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(write_directory("whole", tmp_path))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_verifying_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_directory("whole", tmp_path)
    monkeypatch.setattr("semisparse.checkpoint.digests.digest_of", lambda *_: pytest.fail("hashed a second time"))
    assert inspect_directory(path, verify=True)["verified"]


HEADERS = {
    "an empty file": b"",
    "seven bytes": b"\0" * 7,
    "a length beyond the file": struct.pack("<Q", 1 << 40),
    "no JSON": struct.pack("<Q", 4) + b"nope",
    "a list": struct.pack("<Q", 2) + b"[]",
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


def entries(**offsets: object) -> bytes:
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [1], "data_offsets": at} for name, at in offsets.items()}
    ).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "content",
    [*HEADERS.values(), entries(x=[0, 9]), entries(x=[2, 1]), entries(x="ab"), entries(x=7), entries(x=[0.0, 0.0])],
)
def test_a_malformed_file_has_no_digests(content: bytes, tmp_path: Path):
    block = {"layers": {"x": {"digests": {"": "00"}}, "y": None}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": block}))
    (tmp_path / "model.safetensors").write_bytes(content)
    digests = FileDigests(tmp_path)
    assert digests.get("x.") is None
    digests.stop()
    with pytest.raises(CheckpointError):
        inspect_directory(tmp_path, verify=True)


@pytest.mark.parametrize("size", [1 << 33, 1 << 40])
def test_a_sparse_file_is_refused_at_once(size: int, tmp_path: Path):
    path = write_directory("whole", tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    layers = json.loads((path / "config.json").read_text())["quantization_config"]["layers"]
    name = next(f"{layer}.{tensor}" for layer, entry in layers.items() for tensor in entry["digests"])
    header[name] |= {"shape": [size], "dtype": "U8", "data_offsets": [0, size]}
    changed = json.dumps({name: header[name]}).encode()
    file.write_bytes(struct.pack("<Q", len(changed)) + changed)
    os.truncate(file, 8 + len(changed) + size)
    start = time.monotonic()
    with pytest.raises(CheckpointError):
        inspect_directory(path, verify=True)
    assert time.monotonic() - start < 5


def test_no_digest_is_computed_once_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_directory("whole", tmp_path)
    (name, *_) = expected_digests(path)
    waiting = Event()

    class Waits:
        """A hash that takes until the timer ends."""

        def update(self, piece: memoryview) -> None:
            waiting.wait(9)

    monkeypatch.setattr(file_digests, "new_hash", lambda blake: Waits())
    monkeypatch.setattr(file_digests, "PIECE", 1)
    digests = FileDigests(path)
    Timer(0.2, waiting.set).start()
    digests.stop()
    with pytest.raises(CancelledError):
        digests.get(name)
