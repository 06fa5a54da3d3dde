"""What a source file includes, all of it and nothing else."""

from pathlib import Path

from semisparse.runtime.includes import read_with_includes


def test_headers_beside_a_file_come_before_those_of_the_folders(tmp_path: Path):
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
    found = read_with_includes(tmp_path / "own/main.cu", (tmp_path / "first", tmp_path / "second"))
    wanted = ("own/main.cu", "own/beside.cuh", "first/shared.cuh", "first/next.cuh")
    assert found == {str(tmp_path / name): texts[name] for name in wanted}
