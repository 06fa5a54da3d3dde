"""``plan`` and ``bench`` on the command line."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from semisparse.bench import shapes
from semisparse.cli import bench, plan
from semisparse.errors import FormatError, InputError
from tests.models import TINY

app = typer.Typer()
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")


def call(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


def test_plan_of_a_shape_needs_no_gpu():
    found = call("plan", "--shape", "4096,4096", "--gpu", "h200", "--tokens", "1,16,4096", "--formats", "bitmask")
    assert found["gpu"] == "NVIDIA H200"
    assert [sentence.partition(":")[0] for sentence in found["sentences"][:3]] == ["M = 1", "M = 16", "M = 4,096"]
    row = next(row for row in found["rows"] if row["format"] == "bitmask" and row["m"] == 1)
    assert row["bits_per_weight"] == 9
    assert row["bytes"] == 4096 * 4096 * 9 / 8 + 2 * 2 * 4096
    assert row["intensity"] == pytest.approx(row["operations"] / row["bytes"])
    assert {row["m"] for row in found["best"]} == {1, 16, 4096}


def test_plan_of_a_model_sums_its_layers():
    found = call("plan", "llama3.2-1b", "--gpu", "a100", "--tokens", "1", "--formats", "bitmask")
    totals = {row["candidate"]: row for row in found["totals"]}
    dense = sum(row["us"] * row["count"] for row in found["rows"] if row["format"] == "dense")
    assert totals["dense"]["us"] == pytest.approx(dense)
    assert totals["bitmask 32:64"]["speedup"] > 1


def test_plan_prints_tables(capfd):
    plan.plan(model="llama2-7b", gpu="h100", tokens="1,4096", formats="bitmask")
    shown = " ".join(capfd.readouterr().err.split())
    assert "q_proj, k_proj, v_proj, o_proj" in shown
    assert "M = 4,096: the dense matmul is bound by arithmetic; sparsity will not pay" in shown


def test_plan_of_a_model_prints_the_strategy_of_each_layer(capfd):
    plan.plan(
        model="llama2-7b", gpu="a100", tokens="512", formats="vector_nm", patterns="16:32v32,4:32v32", dtype="float32"
    )
    shown = capfd.readouterr().err
    strategies = " ".join(shown[shown.index("Strategy per layer") :].split())
    assert strategies.count("non-packing, ") == 3  # at 50 % zeros; the same layers are packed at 87.5 %
    assert strategies.count("packing, 14 FLOP/byte per CTA") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan",), "one of the two"),
        (("plan", "llama2-7b", "--shape", "1,2"), "one of the two"),
        (("plan", "--shape", "1x2"), "got 1x2; expected N,K"),
        (("plan", "--shape", "64,64", "--gpu", "abacus"), "unknown GPU"),
        (("plan", "--shape", "64,64", "--tokens", "1,none"), "--tokens takes positive whole numbers"),
        (("plan", "--shape", "64,64", "--tokens", "0"), "--tokens takes positive whole numbers"),
        (("plan", "--shape", "64,64", "--dtype", "int3"), "--dtype takes float16"),
        (("plan", "--shape", "64,64", "--formats", "zip"), "unknown format"),
        (("bench", "kernels", "--device", "abacus"), "unknown device 'abacus'; it is auto"),
        (("bench", "model"), "one of the two"),
        (("bench", "model", "--arch", "llama9", "--device", "cpu"), "unknown architecture"),
        (("bench", "model", "directory", "--set", "kind=int8"), "--pattern and --set go with --arch"),
        (("bench", "model", "--arch", "llama2-7b", "--prompt", "8,x"), "--prompt takes positive whole numbers"),
        (("bench", "model", "--arch", "llama2-7b", "--format", "gqs", "--set", "kind"), "--set takes key=value"),
        (("bench", "compare", "absent.csv"), "cannot be read"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        call(*arguments)


@pytest.mark.slow
def test_bench_kernels_then_compare_then_plot(tmp_path: Path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "results" / "kernels.csv"
    options = ("--formats", "bitmask", "--device", "cpu", "--out", str(out))
    found = call("bench", "kernels", "--shapes", "64,128;96,64", "--tokens", "1,3", *options)
    assert {(row["n"], row["k"], row["m"]) for row in found["rows"]} == {
        (n, k, m) for n, k in ((64, 128), (96, 64)) for m in (1, 3)
    }
    assert all(row["reason"] for row in found["skipped"])
    pictures = {path for path in out.parent.iterdir() if path != out}
    assert {path.name for path in pictures} == {"speedup.png", "roofline.png", "storage.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    compared = call("bench", "compare", str(out), "--gpu", "cpu")
    assert {row["candidate"] for row in compared["rows"]} >= {"dense"}
    assert set(compared["median_error"]) == {row["candidate"] for row in compared["rows"]}
    bench.plot.plot(out, tmp_path / "again")
    assert (tmp_path / "again" / "roofline.png").is_file()


def test_bench_model_of_a_directory(model: Path):
    workload = ("--batch", "1,3", "--prompt", "8", "--new", "2", "--device", "cpu")
    found = call("bench", "model", str(model), "--baseline", str(model), *workload)
    labels = [(row["weights"], row["batch"]) for row in found["rows"]]
    assert labels == [("dense", 1), ("dense", 3), ("as stored", 1), ("as stored", 3)]
    assert all(row["decode_tokens_per_second"] > 0 for row in found["rows"])


def test_bench_model_labels_dense_layers_stored_by_semisparse(monkeypatch):
    monkeypatch.setitem(shapes.ARCHITECTURES, "tiny", TINY)
    found = call(
        "bench",
        "model",
        "--arch",
        "tiny",
        "--format",
        "dense,bitmask",
        "--prompt",
        "8",
        "--new",
        "2",
        "--device",
        "cpu",
    )
    assert [row["weights"] for row in found["rows"]] == ["dense", "dense stored", "bitmask 32:64"]


def test_bench_model_sets_pack_options_and_prompts(monkeypatch):
    monkeypatch.setitem(shapes.ARCHITECTURES, "tiny", TINY)
    workload = ("--prompt", "4,8", "--new", "2", "--device", "cpu")
    found = call("bench", "model", "--arch", "tiny", "--format", "dense,slide24", "--set", "kind=int8", *workload)
    labels = {(row["weights"], row["prompt"]) for row in found["rows"]}
    assert labels == {(name, length) for name in ("dense", "dense int8", "slide24 int8 6:8") for length in (4, 8)}
    sizes = {row["weights"]: row["weight_gb"] for row in found["rows"]}
    assert sizes["slide24 int8 6:8"] < sizes["dense"]
    assert sizes["dense int8"] < sizes["dense"]


@pytest.mark.parametrize("setting", ["kind=int9", "colour=red"])
def test_bench_model_refuses_an_unknown_pack_option_before_measuring(setting):
    with pytest.raises(FormatError, match=r"int9|no pack option colour"):
        call("bench", "model", "--arch", "llama2-7b", "--format", "slide24", "--set", setting, "--device", "cpu")


def test_bench_machine(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    found = call("bench", "machine", "--device", "cpu", "--out", str(tmp_path / "machine.csv"))
    assert "read bandwidth" in {row["name"] for row in found["rows"]}
    assert "read bandwidth" in (tmp_path / "machine.csv").read_text()
