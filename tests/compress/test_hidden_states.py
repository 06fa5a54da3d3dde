"""Hidden states on disk: what is written is read, no file is left, and a disk that cannot hold them is an error."""

import errno
import os
from pathlib import Path

import pytest
import torch

from semisparse.compress.hidden_states import StatesOnDisk, empty_states
from semisparse.errors import SemisparseError

CPU = torch.device("cpu")


def test_states_are_read_as_they_were_written_and_files_have_no_names(tmp_path: Path):
    states, opened = empty_states(tmp_path, CPU), len(os.listdir("/proc/self/fd"))
    expected = [torch.randn(2, 5, 3), torch.randn(1, 7, 3)]
    states.extend(expected)
    assert isinstance(states, StatesOnDisk)
    assert [torch.equal(found, one) for found, one in zip(states, expected, strict=True)] == [True, True]
    read = states[1]
    states[1] = states[1] * 2
    assert torch.equal(read, expected[1]), "what was read is a copy"
    assert torch.equal(states[1], expected[1] * 2)
    del states[0]
    assert len(states) == 1
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == opened, "a job has thousands of batches, a process 1,024 open files"
    assert empty_states(None, CPU) == []


def test_states_take_blocks_of_the_disk_and_no_memory(tmp_path: Path):
    def anonymous() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

    def free() -> int:
        return os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize

    states, part = StatesOnDisk(tmp_path, CPU), torch.ones(1, 1 << 20, 4)
    before, room = anonymous(), free()
    for _ in range(4):
        states.append(part)
    assert anonymous() - before < 16 << 10, "64 MiB were written"
    assert room - free() > 32 << 20
    states.clear()


def test_a_full_disk_is_an_error_with_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SemisparseError, match=f"cannot write hidden states to {tmp_path}: .*No space left.* --offload"):
        StatesOnDisk(tmp_path, CPU).append(torch.zeros(2, 3))
    assert not list(tmp_path.iterdir())
    with pytest.raises(SemisparseError, match=r"cannot write hidden states to .*No such file"):
        StatesOnDisk(tmp_path / "none", CPU).append(torch.zeros(2, 3))
