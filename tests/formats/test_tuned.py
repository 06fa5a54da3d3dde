"""Measured tables: how they are read, which rows apply to a matmul, and that `auto` follows them."""

import pickle
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path

import pytest
import torch

from semisparse.bench.kernels import Setup
from semisparse.bench.machines import find_machine
from semisparse.bench.roofline import Candidate
from semisparse.bench.shapes import LayerShape
from semisparse.bench.tune import add_to_table, of_kinds, tune, unmeasured, users_table
from semisparse.errors import InputError
from semisparse.formats import tuned
from semisparse.formats.base import get_format
from semisparse.formats.kernel import Problem
from semisparse.formats.product import structure_of
from semisparse.formats.spec import WeightSpec
from semisparse.formats.tuned import TunedRow, measured_times, ranking, read_table, table_name, user_table
from semisparse.runtime import device as runtime_device
from tests.cuda_emulator import gpu

HEADER = "format,pattern,variant,dtype,n,k,m,kernel,us,dense_us"


def row(m: int, kernel: str, us: float, **more) -> TunedRow:
    values = {"format": "gqs", "pattern": "g16@50%", "variant": "w4", "dtype": "float16", "n": 256, "k": 512}
    return TunedRow(**{**values, **more}, m=m, kernel=kernel, us=us, dense_us=9.0)


def problem(m: int, n: int = 256, k: int = 512, pattern: str = "g16@50%", dtype=torch.float16) -> Problem:
    return Problem(m, spec_of(n, k, pattern, dtype), dtype, torch.device("cpu"))


@cache
def spec_of(n: int, k: int, pattern: str, dtype: torch.dtype) -> WeightSpec:
    form = get_format("gqs")
    weight = torch.ones(n, k, dtype=dtype)
    weight[:, : k // 2] = 0
    spec = structure_of(form.pack(weight, "g16@50%", kind="w4").spec)
    return WeightSpec(spec.format, 1, form.pack(weight, pattern, kind="w4").pattern, (n, k), dtype, spec.params)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes the user's table of a GPU, for which the CPU stands in."""
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(runtime_device, "_cpu_facts", lambda threads: gpu())
    tuned._rows_of.cache_clear()
    measured_times.cache_clear()
    yield lambda *rows: add_to_table(user_table("emulated"), rows)
    tuned._rows_of.cache_clear()
    measured_times.cache_clear()


def test_the_fastest_kernel_comes_first_and_times_are_interpolated_between_tokens(table):
    table(row(8, "gemm", 10), row(8, "unpack", 30), row(64, "gemm", 50), row(64, "unpack", 31), row(64, "other", 1))
    assert ranking(problem(8), ("kind",)) == ("gemm", "unpack")
    assert ranking(problem(24), ("kind",)) == ("gemm", "unpack")  # 21.4 and 30.3
    assert ranking(problem(48), ("kind",)) == ("unpack", "gemm")  # 38.6 and 30.7
    assert ranking(problem(64), ("kind",)) == ("other", "unpack", "gemm")
    assert ranking(problem(4), ("kind",)) == ()
    assert ranking(problem(128), ("kind",)) == ()


def test_the_nearest_shape_and_pattern_tell_if_they_are_near(table):
    table(row(8, "gemm", 10), row(8, "unpack", 1, n=1024), row(8, "decode", 1, variant="w8"))
    assert ranking(problem(8, n=300), ("kind",)) == ("gemm",)
    assert ranking(problem(8, n=900), ("kind",)) == ("unpack",)
    assert ranking(problem(8, n=4200), ("kind",)) == ()
    assert ranking(problem(8, pattern="g16@40%"), ("kind",)) == ("gemm",)
    assert ranking(problem(8, pattern="g16@0%"), ("kind",)) == ()
    assert ranking(problem(8, dtype=torch.bfloat16), ("kind",)) == ("gemm",)


def test_what_was_measured_for_fewer_tokens_hides_nothing(table):
    exact, near = {"n": 256, "pattern": "g16@50%"}, {"n": 300, "pattern": "g16@40%"}
    table(
        row(1, "full", 5, **exact), row(8, "full", 6, **exact), row(8, "gemm", 10, **near), row(64, "gemm", 20, **near)
    )
    assert ranking(problem(4), ("kind",)) == ("full",)
    assert ranking(problem(8), ("kind",)) == ("full",)
    assert ranking(problem(16), ("kind",)) == ("gemm",)


def test_patterns_with_zeros_and_without_are_never_near(table):
    table(row(8, "gemm", 10), row(8, "full", 1, pattern="g128@0%"))
    assert ranking(problem(8, pattern="g32@0%"), ("kind",)) == ("full",)
    assert ranking(problem(8, pattern="g16@20%"), ("kind",)) == ()  # g128@0% is nearer than g16@50%


def test_another_dtype_is_used_for_what_the_own_one_has_no_times(table):
    table(row(8, "gemm", 10), row(64, "gemm", 20), row(64, "unpack", 5, dtype="bfloat16"))
    assert ranking(problem(64, dtype=torch.bfloat16), ("kind",)) == ("unpack",)
    assert ranking(problem(8, dtype=torch.bfloat16), ("kind",)) == ("gemm",)


def test_the_users_rows_replace_shipped_ones(table, tmp_path):
    add_to_table(tmp_path / "shipped" / "emulated.csv", [row(8, "gemm", 10), row(8, "unpack", 20)])
    assert ranking(problem(8), ("kind",)) == ("gemm", "unpack")
    tuned._rows_of.cache_clear()
    measured_times.cache_clear()
    table(row(8, "gemm", 30))
    assert ranking(problem(8), ("kind",)) == ("unpack", "gemm")


def test_measuring_again_replaces_a_products_rows_alone(tmp_path):
    path = tmp_path / "a.csv"
    add_to_table(path, [row(8, "gemm", 10), row(8, "unpack", 20), row(16, "gemm", 11)])
    add_to_table(path, [row(8, "gemm", 12)])
    assert [(r.m, r.kernel, r.us) for r in read_table(path)] == [(16, "gemm", 11.0), (8, "gemm", 12.0)]


def test_products_take_the_measured_kernel(table, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    monkeypatch.setattr("semisparse.formats.tuned.device_facts", lambda device: gpu())
    monkeypatch.setattr("semisparse.runtime.kernel.device_facts", lambda device: gpu())
    asked = problem(8)
    asked = Problem(asked.m, asked.spec, asked.dtype, torch.device("cuda"))
    form = get_format("gqs")
    assert form.choose(asked).name == "decode"
    table(row(8, "gemm", 2), row(8, "gone", 1), row(8, "decode", 3))
    tuned._rows_of.cache_clear()
    measured_times.cache_clear()
    assert form.choose(asked).name == "gemm"
    assert form.choose(asked, "unpack").name == "unpack"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{HEADER}\ngqs,g16@50%,w4,float16,256,512,8,gemm,fast,9", "line 2"),
        (f"{HEADER}\ngqs,g16@50%,w4,float16,256,512,8,gemm,1,9\ngqs,g16@50%,w4,float16,256,512,8,gemm,-1,9", "line 3"),
        (f"{HEADER}\ngqs,half,w4,float16,256,512,8,gemm,1,9", "half"),
        ("format,us\ngqs,1", "expected format, pattern, variant"),
        (f"{HEADER}\ngqs,g16@50%,w4,float16,256,512,8,gemm,inf,9", "not positive"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path, text: str, reason: str):
    (tmp_path / "a.csv").write_text(text + "\n")
    with pytest.raises(InputError, match=reason):
        read_table(tmp_path / "a.csv")


def test_shipped_tables_can_be_read():
    for path in tuned.SHIPPED.glob("*.csv"):
        rows = read_table(path)
        assert path.name == table_name(path.stem)
        for name in {r.format for r in rows}:
            kernels = {kernel.name for kernel in get_format(name).kernels}
            assert {r.kernel for r in rows if r.format == name} <= kernels


@pytest.mark.parametrize("gpu_name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize("m", [1, 16, 256])
def test_a_matmul_on_these_gpus_takes_the_fastest_row(gpu_name: str, m: int):
    times = measured_times(problem(m, 4096, 4096, dtype=torch.bfloat16), ("kind",), gpu_name)
    rows = [
        r
        for r in read_table(tuned.SHIPPED / table_name(gpu_name))
        if (r.format, r.pattern, r.variant, r.dtype) == ("gqs", "g16@50%", "w4", "bfloat16")
        if (r.n, r.k, r.m) == (4096, 4096, m)
    ]
    assert rows
    assert {name: one.us for name, one in times.items() if name in {r.kernel for r in rows}} == {
        r.kernel: r.us for r in rows
    }


def test_variants_are_picked_by_their_values():
    found = [
        Candidate("dense", "0%"),
        Candidate("gqs", "g16@50%", {"kind": "w4"}),
        Candidate("gqs", "g16@50%", {"kind": "w2"}),
    ]
    assert of_kinds(found, None) == found
    assert of_kinds(found, ["w2"]) == [found[0], found[2]]
    with pytest.raises(InputError, match="w5; known here: w2, w4"):
        of_kinds(found, ["w5"])


def test_only_a_gpu_is_tuned():
    with pytest.raises(InputError, match="tables are for GPUs"):
        users_table(torch.device("cpu"))


class Pickling(Executor):
    """Runs calls at once, with what a process would get of their arguments; notes the kernels."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def submit(self, call, *arguments):
        call, arguments = pickle.loads(pickle.dumps((call, arguments)))
        self.kernels.add(arguments[1])
        done: Future = Future()
        done.set_result(call(*arguments))
        return done


def test_an_interrupted_tuning_goes_on_with_what_the_table_lacks(tmp_path: Path):
    shape, path, tokens = LayerShape("", 64, 128, 1), tmp_path / "table.csv", (1, 4)
    candidates = [Candidate("dense", "0%"), *(Candidate("gqs", "g16@50%", {"kind": kind}) for kind in ("w4", "w2"))]
    setup = Setup("", torch.float32, torch.device("cpu"), find_machine("cpu"))
    assert unmeasured(candidates, shape, torch.float32, tokens, path) == candidates
    pool = Pickling()
    first = next(tune(setup, [shape], candidates, tokens, pool))
    assert pool.kernels == {"blas", "cpu", "unpack_cpu"}
    assert {(row.variant, row.m) for row in first} == {("w4", 1), ("w4", 4)}
    add_to_table(path, first)
    assert unmeasured(candidates, shape, torch.float32, tokens, path) == [candidates[0], candidates[2]]
    assert unmeasured(candidates, shape, torch.float32, (1, 2), path) == candidates
    assert unmeasured(candidates, shape, torch.bfloat16, tokens, path) == candidates
    left = unmeasured(candidates, shape, torch.float32, tokens, path)
    for rows in tune(setup, [shape], left, tokens, pool):
        add_to_table(path, rows)
    assert {row.variant for row in read_table(path)} == {"w2", "w4"}
    assert unmeasured(candidates, shape, torch.float32, tokens, path) == []
