"""Each verb works, and --json prints one object with the keys that scripts rely on."""

import filecmp
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

import semisparse
from semisparse import cli
from semisparse.cli.output import print_json
from semisparse.compress.journal import Journal
from tests.conftest import Run
from tests.forked import exit_code
from tests.models import byte_tokenizer

SMALL = ("--samples", "4", "--seqlen", "32")
UNSEARCHED = (*SMALL, "--set", "search=none")
EVOLUTION = (*SMALL, "--set", "search=evolution", "--set", "search_effort=6")


def assert_same_files(left: Path, right: Path) -> None:
    names = sorted(p.name for p in left.iterdir())
    assert names == sorted(p.name for p in right.iterdir())
    for name in names:
        assert filecmp.cmp(left / name, right / name, shallow=False), name


def test_compress_then_everything_else(run: Run, model: Path, text: Path, tmp_path: Path):
    out = tmp_path / "out"
    done = run("compress", model, "--recipe", "rheosparse", "--calib", text, "--out", out, *EVOLUTION, "--json")
    assert done.status == 0, done.err
    report = done.json
    sizes = "bytes_before", "bytes_after", "bytes_on_gpu"
    keys = "layers", *sizes, "seconds", "dense", "dense_share", "search", "tuning"
    assert tuple(report) == keys
    assert [(layer["name"], layer["reason"]) for layer in report["dense"]] == [
        ("lm_head", "outside the decoder layers")
    ]
    head = 259 * 24 * 2
    assert report["dense_share"] == head / (head + report["bytes_before"])
    assert len(report["layers"]) == 14
    for layer in report["layers"]:
        assert set(layer) == {"name", "pattern", "format", "density", "bits_per_weight", "error", "outcome"}
        assert (layer["format"], layer["outcome"]) == ("bitmask", "sparsegpt")
        assert 18 <= int(layer["pattern"].removesuffix(":64")) <= 46
        assert 0 < layer["error"] < 1
    assert 0 < report["search"]["kl"] <= report["search"]["uniform_kl"]
    assert not (tmp_path / "out.partial").exists()

    dense = load_file(model / "model.safetensors")
    packed = load_file(out / "model.safetensors")
    names = [layer["name"] for layer in report["layers"]]
    assert report["bytes_before"] == sum(dense[f"{name}.weight"].nbytes for name in names)
    assert report["bytes_after"] == sum(t.nbytes for key, t in packed.items() if key.rpartition(".")[0] in names)

    inspected = run("inspect", out, "--verify", "--json").json
    assert inspected["verified"] is True
    assert [
        layer["name"] for layer in inspected["layers"] if layer["format"] == "bitmask"
    ] == names  # in the same order
    assert inspected["bytes"] == sum(tensor.nbytes for tensor in packed.values())
    assert inspected["layer_bytes"] == report["bytes_after"]
    dense_rows = [layer for layer in inspected["layers"] if layer["format"] == "dense"]
    assert {layer["name"]: layer["density"] for layer in dense_rows} == {
        layer["name"]: int(packed[f"{layer['name']}.weight"].count_nonzero()) / math.prod(layer["shape"])
        for layer in dense_rows
    }
    assert inspected["bits_per_weight"] == 8 * report["bytes_after"] / (report["bytes_before"] / 2)  # bfloat16 before

    scored = run("eval", out, "--baseline", model, "--text", text, "--seqlen", 32, "--json").json
    assert scored["tokens"] == 31 * (sum(len(line) + 1 for line in text.read_text().splitlines()) // 32)
    assert scored["kl"] > 0
    assert scored["perplexity"] == pytest.approx(2.718281828459045 ** scored["nll"])

    generated = run("generate", out, "--prompt", "line 1", "--max-new-tokens", 5, "--json").json
    assert generated["text"].startswith("line 1")
    assert generated["tokens_per_second"] > 0
    drafted = run(
        "generate", model, "--prompt", "line 1", "--max-new-tokens", 5, "--speculate", 3, "--draft", out, "--json"
    )
    plain = run("generate", model, "--prompt", "line 1", "--max-new-tokens", 5, "--json")
    assert drafted.json["text"] == plain.json["text"]


def test_the_dense_model_is_its_own_baseline(run: Run, model: Path, text: Path):
    assert run("eval", model, "--baseline", model, "--text", text, "--json").json["kl"] == 0


def test_tables_go_to_stderr_and_leave_stdout_empty(run: Run, model: Path):
    seen = run("inspect", model)
    assert (seen.status, seen.out) == (0, "")
    assert "model.layers.0.mlp.up_proj" in seen.err


def test_formats_say_what_runs_here(run: Run):
    found = {row["name"]: row for row in run("formats", "--json").json["formats"]}
    kernels = {kernel["name"]: kernel for kernel in found["bitmask"]["kernels"]}
    assert kernels["reference"]["runs"] is True
    for kernel in kernels.values():
        assert kernel["runs"] == (kernel["reason"] is None)
    assert kernels["decode"]["runs"] == torch.cuda.is_available()


def test_a_model_pruned_elsewhere_is_packed_as_it_is(run: Run, model: Path, text: Path, tmp_path: Path):
    from semisparse.patterns import parse_pattern

    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor.mul_(parse_pattern("2:4").mask(tensor.abs().float()))
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    arguments = ("--set", "pattern=2:4", "--set", "prune=none", "--out", tmp_path / "out", "--json")
    done = run("compress", model, "--recipe", "rheosparse", *arguments)
    assert done.status == 0, done.err
    assert {layer["density"] for layer in done.json["layers"]} == {0.5}
    assert run("eval", tmp_path / "out", "--baseline", model, "--text", text, "--json").json["kl"] < 1e-9


def test_a_yaml_recipe_and_settings(run: Run, model: Path, text: Path, tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("pattern: 2:4\nprune: wanda\nignore: ['*.down_proj']\n")
    arguments = ("--recipe", recipe, "--calib", text, "--out", tmp_path / "out", "--set", "pattern=g4@50%/row")
    done = run("compress", model, *arguments, *UNSEARCHED, "--json")
    assert done.status == 0, done.err
    assert {layer["pattern"] for layer in done.json["layers"]} == {"g4@50%/row"}
    assert {layer["outcome"] for layer in done.json["layers"]} == {"wanda"}
    assert not any("down_proj" in layer["name"] for layer in done.json["layers"])


def test_magnitude_needs_no_text(run: Run, model: Path, tmp_path: Path):
    arguments = ("--set", "prune=magnitude", "--set", "search=none", "--out", tmp_path / "out", "--json")
    done = run("compress", model, "--recipe", "rheosparse", *arguments)
    assert done.status == 0, done.err
    assert done.json["search"] is None
    assert {layer["error"] for layer in done.json["layers"]} == {None}


def test_the_same_run_gives_the_same_bytes_and_another_seed_does_not(run: Run, model: Path, text: Path, tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = ("--calib", text, "--out", tmp_path / name, "--seed", seed, *UNSEARCHED)
        assert run("compress", model, "--recipe", "rheosparse", *arguments).status == 0
    assert_same_files(tmp_path / "a", tmp_path / "b")
    weights = "model.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() != (tmp_path / "c" / weights).read_bytes()


def run_until_written(piece: str, arguments: list[str]) -> None:
    """Run the command line, and exit once the journal has a piece of this name."""
    save = Journal.save

    def save_and_die(self: Journal, part: str, index: int, *more: Any) -> None:
        save(self, part, index, *more)
        if f"{part}-{index:04}" == piece:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.save = save_and_die
    sys.argv = ["semisparse", *arguments]
    cli.main()


@pytest.mark.parametrize(
    ("settings", "piece"), [pytest.param(EVOLUTION, "pass-0000", marks=pytest.mark.slow), (UNSEARCHED, "block-0000")]
)
def test_resume_after_sigkill_gives_the_same_bytes(
    run: Run, model: Path, text: Path, tmp_path: Path, settings: tuple[str, ...], piece: str
):
    arguments = ["compress", str(model), "--recipe", "rheosparse", "--calib", str(text), *settings, "--resume"]
    assert run(*arguments, "--out", tmp_path / "whole").status == 0
    out = tmp_path / "out"
    assert exit_code(run_until_written, piece, [*arguments, "--out", str(out)]) == -signal.SIGKILL
    assert (tmp_path / "out.partial" / f"{piece}.json").exists()
    assert not out.exists()

    refused = run(*arguments[:-1], "--out", out)
    assert refused.status == 2
    assert "go on with --resume" in refused.err
    assert run(*arguments, "--out", out).status == 0
    assert_same_files(tmp_path / "whole", out)
    assert os.listdir(tmp_path).count("out.partial") == 0


def test_resume_of_a_finished_run_changes_nothing(run: Run, model: Path, text: Path, tmp_path: Path):
    arguments = ("compress", model, "--recipe", "rheosparse", "--calib", text, "--out", tmp_path / "out", *UNSEARCHED)
    first = run(*arguments, "--json").json
    second = run(*arguments, "--resume", "--json").json
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    print_json({"perplexity": float("inf"), "more": [float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "more": [None, 1.5]}


def test_the_version_is_the_package_s(run: Run):
    from importlib.metadata import version

    assert run("--version").out.strip() == version("semisparse") == semisparse.__version__


def test_compress_tells_of_its_tuning(run: Run, model: Path, text: Path, tmp_path: Path):
    arguments = (
        "--recipe",
        "gqsa",
        "--set",
        "pattern=g4@50%",
        "--set",
        "tune_epochs=1",
        "--samples",
        8,
        "--seqlen",
        32,
    )
    done = run("compress", model, *arguments, "--calib", text, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert all(word in done.out + done.err for word in ("held-out loss", "decoder layer 2 of 2", "end to end"))


def test_compress_ends_with_what_stays_dense(run: Run, text: Path, tmp_path: Path):
    model = tmp_path / "mixture"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=259, **sizes, num_hidden_layers=2, num_local_experts=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    arguments = (
        "--recipe",
        "rheosparse",
        "--set",
        "prune=magnitude",
        "--set",
        "search=none",
        "--set",
        "ignore=*.v_proj",
    )
    done = run("compress", model, *arguments, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    said = " ".join((done.out + done.err).split())  # the console wraps
    dense = said[said.index("dense: ") : said.index("of the bytes of all linear weights")]
    for part in ("v_proj", "mlp.gate", "lm_head (outside the decoder layers)", "%"):
        assert part in dense, dense
