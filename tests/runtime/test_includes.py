"""`read_with_includes` returns every included header and no other file."""

from pathlib import Path

from semisparse.runtime.includes import read_with_includes


def test_headers_beside_a_file_precede_those_in_the_include_path(tmp_path: Path):
    for name in ("own", "first", "second"):
        (tmp_path / name).mkdir()
    texts = {
        "own/main.cu": '#include "beside.cuh"\n # include <shared.cuh>\n#include <none>\n// #include "second.cuh"\n',
        "own/beside.cuh": '#include "main.cu"\n#include "shared.cuh"\n',
        "first/shared.cuh": '#include "next.cuh"\n',
        "first/next.cuh": "",
        "first/beside.cuh": "not this",
        "second/shared.cuh": "nor this",
        "second/second.cuh": "nor this",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    texts_read = read_with_includes(tmp_path / "own/main.cu", (tmp_path / "first", tmp_path / "second"))
    wanted = ("own/main.cu", "own/beside.cuh", "first/shared.cuh", "first/next.cuh")
    assert texts_read == {str(tmp_path / name): texts[name] for name in wanted}
