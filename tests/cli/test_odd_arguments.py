"""Arguments that no one means: impossible numbers, paths and names end in one sentence, before any work is done."""

import shutil
from pathlib import Path

import pytest

import semisparse
from tests.cli.test_hostile import run_verb
from tests.conftest import Outcome, Run
from tests.limited import limited
from tests.models import byte_tokenizer, random_model

LONG = "9" * 5000

WITHOUT_CALIBRATION = ("--recipe", "rheosparse", "--set", "search=none", "--set", "prune=magnitude")


def assert_sentence(outcome: Outcome, sentence: str, status: int = 2) -> None:
    assert (outcome.status, outcome.out) == (status, ""), outcome
    assert sentence in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err
    assert "unexpected" not in outcome.err
    assert len(outcome.err) < 3000


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--seed", str(1 << 64), "it is a number of 64 bits"),
        ("--seed", str(-(1 << 63) - 1), "it is a number of 64 bits"),
        ("--max-new-tokens", "0", "ask for at least 1"),
        ("--max-new-tokens", str(10**30), "exceed the model's context"),
        ("--temperature", "nan", "it is 0 (greedy) or above"),
        ("--top-p", "0", "it is above 0, 1 at most"),
        ("--top-k", "-1", "or a number of tokens"),
        ("--speculate", "32", "it is 0 to 31"),
        ("--device", "tpu", "it is auto, cpu, cuda or cuda:N"),
        ("--device", "cuda:99", "device cuda:99: "),
        ("--prompt", "", "a prompt is empty"),
        ("--stop", "", "a --stop text is empty"),
        ("--prompt", "a" * 10**5, "exceed the model's context"),
    ],
)
def test_numbers_of_generate(run: Run, compressed: Path, option: str, value: str, sentence: str):
    options = {"--prompt": "a", "--max-new-tokens": "2", option: value}
    outcome = run("generate", compressed, *(word for pair in options.items() for word in pair), "--json")
    assert_sentence(outcome, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shape", f"{LONG},1"), "expected N,K"),
        (("--shape", "0,0"), "empty weight"),
        (("--shape", "64,64", "--tokens", LONG), "--tokens takes positive whole numbers"),
        (("--shape", "64,64", "--tokens", ""), "--tokens takes positive whole numbers"),
    ],
)
def test_numbers_of_plan(run: Run, arguments: tuple[str, ...], sentence: str):
    assert_sentence(run("plan", *arguments), sentence)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("x" * 300, "File name too long"),
        ("file/below", "file is no directory"),
        ("file", "exists already"),
        ("link", "exists already"),
        ("small", "exists already"),
        ("/dev/full", "exists already"),
    ],
)
@pytest.mark.parametrize("verb", ["compress", "export"])
def test_outputs_that_cannot_be_written(
    run: Run, model: Path, compressed: Path, tmp_path: Path, verb: str, place: str, sentence: str
):
    """They are refused before the model is loaded, and nothing is left beside them."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    shutil.copytree(compressed, tmp_path / "small")
    before = sorted(tmp_path.rglob("*"))
    first = ("compress", model, *WITHOUT_CALIBRATION) if verb == "compress" else ("export", compressed, "--to", "dense")
    outcome = run(*first, "--out", tmp_path / place, "--json")
    assert_sentence(outcome, sentence)
    assert "Loading" not in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_recipe_with_a_long_name(run: Run, model: Path, tmp_path: Path):
    outcome = run("compress", model, "--recipe", "x" * 5000, "--out", tmp_path / "out")
    assert_sentence(outcome, "unknown recipe 'xxx")


def test_a_plot_is_checked_before_the_front_is_measured(run: Run, model: Path, text: Path):
    assert_sentence(run("frontier", model, "--calib", text, "--plot", "front.txt"), "ends in .png")


@pytest.mark.parametrize("form", ["../small", "small", "./small/", "../{parent}/small", "ü ✓'\"$x"])
def test_a_directory_by_any_name(
    run: Run, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    """Paths with ``..`` lead to the same model; so they do for the output of compress, which loads what it wrote."""
    shutil.copytree(compressed, tmp_path / "here" / "small")
    shutil.copytree(compressed, tmp_path / "small")
    shutil.copytree(compressed, tmp_path / "here" / "ü ✓'\"$x")
    monkeypatch.chdir(tmp_path / "here")
    path = form.format(parent="here")
    assert run("generate", path, "--prompt", "a", "--max-new-tokens", 2, "--json").status == 0
    model = random_model("llama")
    semisparse.compress(
        model, byte_tokenizer(), "rheosparse", None, "../x", settings=("search=none", "prune=magnitude")
    )
    assert (tmp_path / "x" / "config.json").exists()


def test_a_verb_whose_memory_is_full(compressed: Path):
    ended = limited(run_verb, ("generate", compressed, "--batch", "/dev/zero"))
    assert ended.value is not None, ended
    assert_sentence(Outcome(ended.value[0], "", ended.value[1]), "the memory is full", status=1)


@pytest.mark.parametrize("verb", ["generate", "eval", "inspect", "export", "plan", "warm", "serve", "compress"])
@pytest.mark.parametrize("place", ["empty", "file", "nowhere", "/dev/null"])
def test_no_model(run: Run, text: Path, tmp_path: Path, verb: str, place: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    rest: dict[str, tuple[object, ...]] = {
        "generate": ("--prompt", "a"),
        "eval": ("--text", text),
        "export": ("--to", "dense", "--out", tmp_path / "out"),
        "compress": (*WITHOUT_CALIBRATION, "--out", tmp_path / "out"),
    }
    expected = "config.json" if place == "empty" or verb in ("plan", "serve") else "no model directory at"
    assert_sentence(run(verb, tmp_path / place, *rest.get(verb, ())), expected)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [".", ""])
def test_a_file_missing_from_the_working_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    monkeypatch.chdir(tmp_path)
    assert_sentence(run("inspect", place), f"config.json is missing in {tmp_path}")
