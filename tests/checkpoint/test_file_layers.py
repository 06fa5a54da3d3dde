"""Layers read before torch is imported have the tensors' bytes and digests; a hostile file stops nothing."""

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
from semisparse.checkpoint import direct_read, file_layers
from semisparse.checkpoint.file_layers import FileLayers
from semisparse.errors import CheckpointError
from tests.fuzz.sources import write_directory


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def expected_digests(path: Path) -> dict[str, str]:
    """Return the digest of each tensor that has one in config.json, of the kind that it has there."""
    layers = json.loads((path / "config.json").read_text())["quantization_config"]["layers"]
    tensors, found = stored_tensors(path), {}
    for layer, entry in layers.items():
        for tensor, digest in entry["digests"].items():
            data = octets(tensors[f"{layer}.{tensor}"])
            blake = hashlib.blake2b(data, digest_size=16).hexdigest()
            found[f"{layer}.{tensor}"] = blake if len(digest) == 32 else hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.parametrize("memory", [1 << 29, 1 << 16])
@pytest.mark.parametrize("source", ["whole", "sharded", "experts"])
def test_layers_have_the_bytes_and_digests_of_the_tensors(
    source: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The smaller memory holds few layers at a time, or not even one of those that are left out."""
    monkeypatch.setattr(file_layers, "MEMORY", memory)
    monkeypatch.setattr(direct_read, "PIECE", 4096)
    path = write_directory(source, tmp_path)
    expected, tensors, layers = expected_digests(path), stored_tensors(path), FileLayers(path)
    assert {len(digest) for digest in expected.values()} == {32, 64}
    digests = {}
    for layer in layers.names:
        with layers.held(layer) as stored:
            assert stored
            for name, tensor in stored.items():
                assert bytes(tensor.data) == octets(tensors[name])
                digests[name] = tensor.digest
    layers.stop()
    assert {name for name, digest in digests.items() if digest is None} <= set(tensors) - set(expected)
    computed = {name: digest for name, digest in digests.items() if digest}
    assert computed == {name: digest for name, digest in expected.items() if name in computed}
    assert memory < 1 << 20 or (computed == expected and digests.keys() >= {"lm_head.weight"})


def test_no_torch_is_imported(tmp_path: Path):
    code = "import sys; from semisparse.checkpoint.file_layers import FileLayers as F; F(sys.argv[1]).stop(); "
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
    layers = FileLayers(tmp_path)
    assert layers.names == ()
    layers.stop()
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


def test_nothing_is_read_once_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_directory("whole", tmp_path)
    waiting = Event()

    class Waits:
        """A hash that takes until the timer ends."""

        def update(self, piece: memoryview) -> None:
            waiting.wait(9)

        def hexdigest(self) -> str:
            return "never compared"

    monkeypatch.setattr(file_layers, "new_hash", lambda blake: Waits())
    monkeypatch.setattr(direct_read, "PIECE", 4096)
    layers = FileLayers(path)
    Timer(0.2, waiting.set).start()
    layers.stop()
    with pytest.raises(CancelledError), layers.held(layers.names[-1]):
        pass


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path):
    path = write_directory("sharded", tmp_path)
    file = next(path.glob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="is no regular file"):
        inspect_directory(path, verify=True)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A mapped file would end the process (SIGBUS)."""
    path = write_directory("whole", tmp_path)
    find = file_layers._find_layers

    def find_then_shrink(path: Path) -> dict:
        found = find(path)
        os.truncate(path / "model.safetensors", 20_000)
        return found

    monkeypatch.setattr(file_layers, "_find_layers", find_then_shrink)
    with pytest.raises(CheckpointError, match="truncated"):
        inspect_directory(path, verify=True)


def test_tensors_that_overlap_are_not_read(tmp_path: Path):
    """1,000 tensors of the same megabyte would take 1,000 times its memory."""
    header = json.dumps(
        {f"x.{i}": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]} for i in range(1000)}
    ).encode()
    block = {"layers": {"x": {"digests": {str(i): "00" for i in range(1000)}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": block}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(1 << 20))
    assert FileLayers(tmp_path).names == ()
