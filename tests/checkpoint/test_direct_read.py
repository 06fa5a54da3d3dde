"""Reading ranges of a file gives their bytes, from the page cache or past it, wherever they begin and end."""

import mmap
import os
from io import FileIO
from pathlib import Path

import pytest

from semisparse.checkpoint import direct_read
from semisparse.checkpoint.direct_read import pieces, window_bytes

SIZE = 100_001
CONTENT = os.urandom(SIZE)
RANGES = [(0, SIZE), (0, 1), (4095, 4097), (4096, 8192), (12_289, 90_000), (SIZE - 1, SIZE), (99_999, SIZE)]


def read(file: Path, begin: int, end: int) -> bytes:
    """Return a range read piece by piece, after comparing the pieces with what is left in the memory."""
    window = memoryview(mmap.mmap(-1, max(1, window_bytes(begin, end))))[: window_bytes(begin, end)]
    read = b"".join(bytes(piece) for piece in pieces(file, begin, end, window))
    assert window[begin % direct_read.ALIGNMENT :][: end - begin] == read
    return read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def drop(file: Path) -> None:
    """Write a file to the disk and drop it from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def no_direct_file(file: Path, opened: object) -> None:
    """Take the place of `_open_direct` on a file system without direct reads."""


class Unreadable(FileIO):
    """A file that can be opened for direct reads, but not read so."""

    def readinto(self, part: object) -> int:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("way", ["direct", "no direct file", "direct reads fail", "the cache is not asked"])
def test_every_range(file: Path, cached: bool, way: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct_read, "PIECE", 16384)
    if way == "no direct file":
        monkeypatch.setattr(direct_read, "_open_direct", no_direct_file)
    elif way == "direct reads fail":
        monkeypatch.setattr(direct_read, "_open_direct", lambda file, opened: opened.enter_context(Unreadable(file)))
    elif way == "the cache is not asked":
        monkeypatch.delattr(os, "RWF_NOWAIT")
    for begin, end in RANGES:
        if not cached:
            drop(file)
        assert read(file, begin, end) == CONTENT[begin:end]


def test_a_file_that_is_not_cached_is_read_past_the_page_cache(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise its pages would take the place of others, and CPU time."""
    opened: list[Path] = []
    open_direct = direct_read._open_direct
    monkeypatch.setattr(
        direct_read, "_open_direct", lambda file, stack: opened.append(file) or open_direct(file, stack)
    )
    assert read(file, 0, SIZE) == CONTENT
    assert opened == []
    drop(file)
    with FileIO(file) as plain:
        if direct_read._read_cached(plain, 0, memoryview(bytearray(SIZE))):
            pytest.skip("the file system keeps files in memory")
    assert read(file, 0, SIZE) == CONTENT
    assert opened == [file]


def test_a_file_that_ends_too_early(file: Path):
    with pytest.raises(OSError, match="ends at byte 100001, expected 100002 bytes"):
        read(file, 4096, SIZE + 1)
