"""Every kind of CSV in results/ is drawn, formats differ in colour and marker, and roofs are those of the dtype."""

from dataclasses import replace
from pathlib import Path

import pytest

from semisparse.bench.kernels import Measurement
from semisparse.bench.plot import plot_csv
from semisparse.bench.plot_kernels import roof
from semisparse.bench.pyplot import style_of
from semisparse.bench.table import read_csv
from semisparse.errors import InputError
from semisparse.formats import registry

H200 = Path(__file__).parents[2] / "results" / "h200"

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


DRAWN = [
    *("engine", "model", "parallel"),
    *("ec_csr-decode", "vector_nm-float32", "vector_nm-ablation"),
    # drawn by the functions that draw those above
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gqs-decode", "vector_nm-decode", "ec_csr-ablation")),
]


@pytest.mark.parametrize("name", DRAWN)
def test_results_are_drawn(name: str, tmp_path: Path):
    (picture,) = plot_csv(H200 / f"{name}.csv", tmp_path / "plots")
    assert picture == tmp_path / "plots" / f"{name}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused_with_what_they_lack(tmp_path: Path):
    with pytest.raises(InputError, match=r"has the columns n, k, zeros, .* bench kernels, bench model"):
        plot_csv(H200 / "ec_csr-extraction.csv", tmp_path)
    empty = tmp_path / "empty.csv"
    empty.write_text("a,b\n")
    with pytest.raises(InputError, match="no rows"):
        plot_csv(empty, tmp_path)


def test_formats_differ_in_colour_and_marker():
    styles = [style_of(name) for name in registry()]
    assert len({style["color"] for style in styles}) == len({style["marker"] for style in styles}) == len(registry())
    variants = [style_of("gqs", number) for number in range(8)]
    assert len({(style["linestyle"], style["fillstyle"]) for style in variants}) == 8


def test_the_roof_is_that_of_the_dtype():
    wide = read_csv(H200 / "kernels-float32.csv", Measurement)
    assert roof(wide) == pytest.approx(51e12, rel=0.02)
    few = [replace(row, floor_us=1e6 * row.bytes / row.read_bandwidth) for row in wide]
    assert roof(few) is None  # no dense row is bound by operations, and 16-bit tensor cores are no roof of float32
    half = read_csv(H200 / "kernels-bfloat16.csv", Measurement)
    assert roof(half) == pytest.approx(half[0].peak_fp16, rel=0.02)
