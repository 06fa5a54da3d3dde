"""The cache on disk: entries are built once, rebuilt if damaged, and shared by processes."""

import hashlib
import os
import sys
from pathlib import Path

import pytest

from semisparse.runtime.cache import cache_directory, cached, write_atomically
from tests.forked import run_at_once
from tests.limited import limited


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    return tmp_path


def entry(cache: Path) -> Path:
    (path,) = (cache / "kind").iterdir()
    return path


def fail() -> bytes:
    raise AssertionError("built again")


def test_an_entry_is_built_once(cache):
    assert cached("kind", b"key", lambda: b"content") == b"content"
    assert cached("kind", b"key", fail) == b"content"
    assert cached("kind", b"other key", lambda: b"other") == b"other"


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b + b"x", lambda b: b[:40] + b"?" + b[41:]]
)
def test_a_damaged_entry_is_built_again(cache, damage):
    cached("kind", b"key", lambda: b"content that is longer than its digest, to be cut into")
    path = entry(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cached("kind", b"key", lambda: b"new") == b"new"
    assert cached("kind", b"key", fail) == b"new"


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch):
    def refuse(*paths):
        raise OSError("disk full")

    monkeypatch.setattr("semisparse.runtime.cache.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(cache / "kind" / "file", b"content")
    assert not list((cache / "kind").iterdir())


def test_others_may_read_what_is_written(cache):
    write_atomically(cache / "results.csv", b"content")
    (cache / "plain").touch()
    assert (cache / "results.csv").stat().st_mode == (cache / "plain").stat().st_mode


def test_a_cache_that_cannot_be_written_is_a_warning(cache, monkeypatch):
    blocked = cache / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("SEMISPARSE_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="SEMISPARSE_CACHE") as warned:
        contents = [cached(folder, b"key", lambda: b"content") for folder in ("kind", "other")]
    assert contents == [b"content"] * 2
    assert len(warned) == 1


def build_many() -> None:
    for number in range(200):
        key = b"%d" % (number % 5)
        assert cached("kind", key, lambda key=key: key * 5000) == key * 5000


def test_processes_may_share_it(cache):
    run_at_once(build_many)
    assert len(list((cache / "kind").iterdir())) == 5


@pytest.mark.parametrize(
    ("platform", "variable", "below"),
    [
        ("linux", "XDG_CACHE_HOME", "semisparse"),
        ("win32", "LOCALAPPDATA", "semisparse"),
    ],
)
def test_the_directory_is_the_platforms(monkeypatch, tmp_path, platform, variable, below):
    monkeypatch.delenv("SEMISPARSE_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_directory() == tmp_path / below


def test_an_entry_that_others_could_have_written_is_built_again(cache):
    cached("kind", b"key", lambda: b"content")
    entry(cache).chmod(0o666)
    assert cached("kind", b"key", lambda: b"new") == b"new"
    assert cached("kind", b"key", fail) == b"new"
    assert entry(cache).stat().st_mode & 0o022 == 0


def test_an_entry_in_the_place_of_another_is_built_again(cache):
    cached("kind", b"key", lambda: b"content")
    first = entry(cache)
    cached("kind", b"other key", lambda: b"other")
    (second,) = set((cache / "kind").iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert cached("kind", b"other key", lambda: b"again") == b"again"


def test_a_link_is_not_followed(cache, tmp_path):
    cached("kind", b"key", lambda: b"content")
    entry(cache).rename(tmp_path / "elsewhere")
    (cache / "kind" / "link").symlink_to(tmp_path / "elsewhere")
    (cache / "kind" / "link").rename(cache / "kind" / Path(hashlib.sha256(b"key").hexdigest()))
    assert cached("kind", b"key", lambda: b"new") == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs are POSIX")
def test_a_fifo_in_the_place_of_an_entry_is_not_waited_for(cache):
    cached("kind", b"key", lambda: b"content")
    path = entry(cache)
    path.unlink()
    os.mkfifo(path)
    reads = limited(lambda: cached("kind", b"key", lambda: b"new").decode(), seconds=30)
    assert reads.value == "new"


def test_a_directory_that_others_can_write_is_closed(cache):
    cached("kind", b"key", lambda: b"content")
    (cache / "kind").chmod(0o777)
    assert cached("kind", b"key", fail) == b"content"
    assert (cache / "kind").stat().st_mode & 0o022 == 0


def test_the_directory_of_another_user_is_not_used(cache, monkeypatch):
    cached("kind", b"key", lambda: b"content")
    monkeypatch.setattr("semisparse.runtime.cache._is_ours", lambda status: False)
    with pytest.warns(UserWarning, match="belongs to another user: the cache is not used"):
        assert cached("kind", b"key", lambda: b"built") == b"built"
    assert len(list((cache / "kind").iterdir())) == 1
