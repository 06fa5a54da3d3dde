"""The key of a cubin in the cache: the texts that were compiled, not where they are installed."""

from pathlib import Path

import pytest

from semisparse.runtime import nvrtc


def written(folder: Path, header: str, source: str = '#include "a.cuh"\nint b;') -> Path:
    folder.mkdir()
    (folder / "a.cuh").write_text(header)
    (folder / "main.cu").write_text(source)
    return folder / "main.cu"


def test_key_depends_on_texts_and_macros_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvrtc, "_include_path", lambda path: (path.parent,))
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 0))
    first, moved = written(tmp_path / "first", "int a;"), written(tmp_path / "moved", "int a;")
    other, longer = (
        written(tmp_path / "other", "int c;"),
        written(tmp_path / "longer", "int a;", '#include "a.cuh"\nint bb;'),
    )
    key = nvrtc._key(first, "sm_90a", {"M": 1})
    assert nvrtc._key(moved, "sm_90a", {"M": 1}) == key
    others = [(other, "sm_90a", 1), (longer, "sm_90a", 1), (first, "sm_80", 1), (first, "sm_90a", 2)]
    keys = {nvrtc._key(path, arch, {"M": value}) for path, arch, value in others}
    assert len(keys | {key}) == 5
