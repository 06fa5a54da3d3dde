"""Bad input prints one sentence on stderr and exits with 2, a failure with 1; no partial output looks complete."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from semisparse import cli
from tests.conftest import Outcome, Run
from tests.forked import exit_code

SMALL = ("--samples", "4", "--seqlen", "32", "--set", "search=none")
EVOLUTION = ("--set", "search=evolution", "--set", "search_effort=6")


def assert_refused(outcome: Outcome, sentence: str, status: int = 2) -> None:
    assert (outcome.status, outcome.out) == (status, "")
    assert sentence in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


@pytest.fixture
def compress(run: Run, model: Path, text: Path, tmp_path: Path):
    def call(*arguments: object, calib: Path = text, source: Path = model, recipe: object = "rheosparse") -> Outcome:
        out = tmp_path / "out"
        return run("compress", source, "--recipe", recipe, "--calib", calib, "--out", out, *SMALL, "--json", *arguments)

    return call


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("colour=red", "unknown recipe key 'colour'; the known keys are: pattern, prune"),
        ("prune=scissors", "it is one of: magnitude, wanda, sparsegpt, sparsegpt-published, none"),
        ("pattern=9:8", "pattern 9:8"),
        ("pattern", "not written key=value"),
        ("format=zip", "unknown format 'zip'; known: bitmask"),
        ("damping=much", "it is a number"),
        ("search=luck", "it is one of: profile, evolution, rheosparse, joint, none"),
        ("search_effort=0", "of 1 or more"),
        ("pattern=64:64", "no weights can move between the linear layers at pattern 64:64; choose another"),
    ],
)
def test_a_wrong_setting(compress, setting: str, sentence: str):
    assert_refused(compress(*EVOLUTION, "--set", setting), sentence)


def test_a_wrong_recipe(compress, tmp_path: Path):
    assert_refused(compress(recipe="nonsense"), "unknown recipe 'nonsense'; known: auto, dense-w2")
    (tmp_path / "bad.yaml").write_text("pattern: [")
    assert_refused(compress(recipe=tmp_path / "bad.yaml"), "is not valid YAML")
    (tmp_path / "bad.yaml").write_text("quant: []")
    assert_refused(compress(recipe=tmp_path / "bad.yaml"), "recipe key 'quant' is []; it is text")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b" \n", "is empty"),
        ("latin.txt", b"caf\xe9 " * 1000, "is not UTF-8"),
        ("short.txt", b"short", "too little for one sequence of 32 tokens"),
        ("bad.jsonl", b'{"text": "a"}\n{"txet": "b"}\n', 'line 2: expected a JSON object with "text"'),
        ("number.jsonl", b'{"text": 5}\n', '"text" is int, expected a string'),
        ("missing.txt", None, "cannot read"),
    ],
)
def test_a_wrong_text(compress, tmp_path: Path, name: str, content: bytes | None, sentence: str):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert_refused(compress(calib=file), sentence)


def test_no_text_where_it_is_needed(run: Run, model: Path, tmp_path: Path):
    outcome = run("compress", model, "--recipe", "rheosparse", "--out", tmp_path / "out")
    assert_refused(outcome, "needs calibration text")


def test_sequences_of_unfit_length(run: Run, compress, model: Path, text: Path):
    assert_refused(compress("--seqlen", "100"), "seqlen is 100, the model's context is 64")
    assert_refused(run("eval", model, "--text", text, "--seqlen", 1), "seqlen is at least 2")
    assert_refused(run("generate", model, "--prompt", "a", "--max-new-tokens", 100), "exceed the model's context of 64")


def test_an_option_that_needs_another(run: Run, model: Path):
    assert_refused(run("generate", model, "--prompt", "a", "--draft", model), "proposes the tokens of --speculate N")
    assert_refused(run("eval", model), "nothing to measure")


@pytest.mark.parametrize("verb", ["compress", "eval", "generate", "inspect"])
def test_a_missing_or_half_written_model(run: Run, verb: str, model: Path, text: Path, tmp_path: Path):
    rest = {
        "compress": ("--recipe", "rheosparse", "--calib", text, "--out", tmp_path / "out"),
        "eval": ("--text", text),
        "generate": ("--prompt", "a"),
        "inspect": (),
    }[verb]
    assert_refused(run(verb, tmp_path / "nowhere", *rest), "no model directory at")
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert_refused(run(verb, model, *rest), "is truncated or not a safetensors file")
    file.unlink()
    torch.save({}, model / "pytorch_model.bin")
    assert_refused(run(verb, model, *rest), "a pickle; semisparse reads safetensors only")


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("prune", ["sparsegpt", "magnitude", "none"])
def test_a_weight_that_is_not_finite(compress, model: Path, value: float, prune: str):
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, file, metadata={"format": "pt"})
    pattern = "0%" if prune == "none" else "32:64"  # a dense weight obeys 0% only
    search = () if prune == "none" else EVOLUTION
    outcome = compress("--set", f"prune={prune}", "--set", f"pattern={pattern}", *search)
    assert_refused(outcome, "model.layers.1.mlp.up_proj: the weight holds NaN or infinity")


def test_a_weight_that_breaks_the_pattern(compress):
    outcome = compress("--set", "prune=none", "--set", "pattern=2:4")
    assert_refused(
        outcome, "layer model.layers.0.self_attn.q_proj: the weight does not obey 2:4: row 0, columns 0 to 3"
    )


def test_an_output_that_exists(compress, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert_refused(compress(), "exists already; choose another --out or remove it")
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_an_output_inside_the_model_changes_no_file_of_it(run: Run, compress, model: Path, text: Path, tmp_path: Path):
    """--out may be there: it appears only when it is complete, and loaders read no subdirectories of a model."""
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    inside = model / "sparse"
    options = ("--recipe", "rheosparse", "--calib", text, *SMALL, "--set", "prune=magnitude")
    assert run("compress", model, *options, "--out", inside).status == 0
    assert run("export", inside, "--to", "dense", "--out", inside / "dense").status == 0
    assert {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()} == before
    assert compress("--set", "prune=magnitude").status == 0  # of the same model, which has a directory in it now
    written = {file.name: file.read_bytes() for file in inside.iterdir() if file.is_file()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == written


def test_a_compressed_model_is_not_compressed_again(compress, compressed: Path):
    assert_refused(compress(source=compressed), "is compressed already")


def test_a_run_without_finished_work_leaves_nothing(run: Run, compress, model: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    assert_refused(run("compress", model, "--recipe", "rheosparse", "--out", out, "--json"), "needs calibration text")
    with monkeypatch.context() as patch:
        patch.setattr("semisparse.api.compression._run_recipe", lambda *arguments, **options: 1 / 0)
        assert_refused(compress(), "unexpected ZeroDivisionError", status=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))]


def test_resume_with_other_settings(run: Run, compress, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def interrupted(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", interrupted)
        assert_refused(compress(), "No space left on device", status=1)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()
    assert_refused(compress("--resume", "--seed", "1"), "differs in: calibration tokens, seed")
    assert_refused(compress("--resume", "--set", "prune=wanda"), "differs in: recipe")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        assert_refused(compress("--resume"), "differs in: number of CPU threads")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert_refused(compress("--resume"), "differs in: model weights;")
    (model / "model.safetensors").write_bytes(weights)
    assert compress("--resume").status == 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith((".out", "out"))) == ["out"]


def test_a_full_disk_under_the_journal(compress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert_refused(compress(), "No space left on device", status=1)
    assert not (tmp_path / "out").exists()
    assert compress("--resume").status == 0


@pytest.mark.slow
def test_two_runs_into_one_directory_and_control_c(model: Path, tmp_path: Path, run: Run):
    text = tmp_path / "long.txt"
    text.write_text("".join(f"line {i} of a longer text\n" for i in range(1000)))
    out = tmp_path / "out"
    rest = ["--recipe", "rheosparse", "--calib", str(text), "--out", str(out), "--samples", "300", "--seqlen", "64"]
    command = [sys.executable, "-m", "semisparse.cli", "compress", str(model), *rest]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **pipes, preexec_fn=listens)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.partial" / "fingerprint.json").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # the first must not end before the second starts
    assert_refused(run("compress", model, *rest, "--resume"), "another run is writing to")
    assert_refused(run("generate", out, "--prompt", "a"), "no model directory at")
    assert_refused(run("generate", tmp_path / "out.partial", "--prompt", "a"), "config.json is missing")
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGCONT)
    printed, errors = first.communicate(timeout=60)
    assert (first.returncode, printed) == (130, "")
    assert "interrupted; the same command with --resume goes on" in errors
    assert "Traceback" not in errors
    assert not out.exists()


def spoil_bits(tensors: dict[str, torch.Tensor], config: dict) -> None:
    tensors["model.layers.1.mlp.up_proj.masks"][7, 0] ^= 1


def spoil_length(tensors: dict[str, torch.Tensor], config: dict) -> None:
    tensors["model.layers.1.mlp.up_proj.values"] = tensors["model.layers.1.mlp.up_proj.values"][:-1].clone()


def spoil_version(tensors: dict[str, torch.Tensor], config: dict) -> None:
    config["quantization_config"]["layers"]["model.layers.1.mlp.up_proj"]["version"] = 7


def spoil_shape(tensors: dict[str, torch.Tensor], config: dict) -> None:
    config["intermediate_size"] = 88


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_bits, "model.layers.1.mlp.up_proj"),
        (spoil_length, "config.json declares"),
        (spoil_version, "version 7 is unknown"),
        (spoil_shape, "config.json does not fit the model"),
    ],
)
def test_a_corrupted_checkpoint(run: Run, compressed: Path, text: Path, tmp_path: Path, spoil, sentence: str):
    out = shutil.copytree(compressed, tmp_path / "out")
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    spoil(tensors, config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    assert_refused(run("eval", out, "--text", text), sentence)
    assert_refused(run("generate", out, "--prompt", "a"), sentence)
    if spoil is not spoil_shape:  # inspect reads the tensors without building the model
        assert_refused(run("inspect", out, "--verify"), sentence)


def run_until_saved(arguments: list[str]) -> None:
    """Run the command line, and kill it after the weights are written, before the directory is renamed."""
    save = PreTrainedModel.save_pretrained

    def save_and_die(*positional: Any, **named: Any) -> None:
        save(*positional, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    PreTrainedModel.save_pretrained = save_and_die
    sys.argv = ["semisparse", *arguments]
    cli.main()


def test_a_kill_while_saving_leaves_no_output_directory(run: Run, model: Path, tmp_path: Path):
    settings = ["--set", "prune=magnitude", "--set", "search=none"]
    arguments = ["compress", str(model), "--recipe", "rheosparse", *settings, "--out", str(tmp_path / "out")]
    assert exit_code(run_until_saved, arguments) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.partial"]
    assert not (tmp_path / "out.partial" / "config.json").exists()
    (tmp_path / "out.partial" / ".block-0001.safetensors.half").write_bytes(b"half")
    assert exit_code(run_until_saved, [*arguments, "--resume"]) == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "out.partial").glob(".*")]
    assert len(left) == 1, f"half-written files of the first run are still there: {left}"
    assert run(*arguments, "--resume").status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_an_unknown_verb_and_a_missing_argument_are_usage_errors(run: Run):
    assert run("squeeze").status == 2
    assert run("inspect").status == 2


def test_a_traceback_only_with_debug(run: Run, tmp_path: Path):
    for options in ((), ("--debug",)):
        failed = run("inspect", tmp_path / "nowhere", *options)
        assert failed.status == 2
        assert "error: no model directory at" in failed.err
        assert ("Traceback" in failed.err) == bool(options)
