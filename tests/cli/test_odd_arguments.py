"""Arguments that no one means: impossible numbers, paths and names end in one sentence, before any work is done."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

import semisparse
from tests.choosing import mostly_slow
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
        ("--temperature", "nan", "it is 0 (greedy) or a finite number above"),
        ("--temperature", "inf", "it is 0 (greedy) or a finite number above"),
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
        (("--shape", "64,64", "--tokens", str(10**18)), "--tokens takes positive whole numbers below 10^18"),
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
        ("/", "/ exists already"),
        ("empty", "the current directory"),
    ],
)
@pytest.mark.parametrize("verb", ["compress", "export"])
def test_outputs_that_cannot_be_written(
    run: Run, model: Path, compressed: Path, tmp_path: Path, monkeypatch, verb: str, place: str, sentence: str
):
    """They are refused before the model is loaded, and nothing is left beside them."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
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


def test_a_model_that_is_not_there_is_named_before_the_missing_text(run: Run, tmp_path: Path):
    outcome = run("compress", tmp_path / "nowhere", "--recipe", "dense-w4", "--out", tmp_path / "out")
    assert_sentence(outcome, "no model directory at", 2)


@pytest.mark.parametrize("place", ["/proc/x.csv", "folder", "file/x.csv"])
@pytest.mark.parametrize("verb", [("kernels", "--shapes", "64,64"), ("machine",), ("tune", "--shapes", "64,64")])
def test_a_csv_that_cannot_be_written_is_refused_before_the_work(
    run: Run, tmp_path: Path, place: str, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("semisparse.api.pick_device", lambda device: pytest.fail("it has begun"))
    assert_sentence(run("bench", *verb, "--out", tmp_path / place), f"cannot write {tmp_path / place}")


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(run: Run, model: Path, text: Path):
    assert_sentence(run("frontier", model, "--calib", text, "--plot", "/proc/x.png"), "cannot write /proc/x.png")


@pytest.mark.parametrize("code", [{}, {"auto_map": {"AutoConfig": "x.C"}}])
def test_an_architecture_that_transformers_does_not_know(run: Run, model: Path, code: dict[str, object]):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | code | {"model_type": "llama9"}))
    outcome = run("generate", model, "--prompt", "a")
    assert_sentence(outcome, "has no model_type 'llama9'", 2)
    assert ("its code is in the directory, and is not run" in " ".join(outcome.err.split())) == bool(code)
    assert len(outcome.err) < 400


def test_a_method_of_another_tool_that_is_not_read(run: Run, model: Path, tmp_path: Path):
    file = model / "config.json"
    block = {"quantization_config": {"quant_method": "bitsandbytes"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | block))
    for verb in (("inspect", model), ("compress", model, "--recipe", "keep", "--out", tmp_path / "out")):
        assert_sentence(run(*verb), "for any other method, take the dense model")


@pytest.mark.parametrize("verb", ["compress", "eval"])
def test_a_progress_bar_ends_full(run: Run, model: Path, text: Path, tmp_path: Path, verb: str):
    rest = ("--text", text) if verb == "eval" else (*WITHOUT_CALIBRATION, "--out", tmp_path / "out")
    outcome = run(verb, model, *rest)
    counts = re.findall(r"(\d+)/(\d+)", outcome.err)
    assert (outcome.status, bool(counts)) == (0, True), outcome
    assert counts[-1][0] == counts[-1][1], counts


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["abc", [[1]], {}, True, 3.5])
def test_an_end_token_that_is_none(run: Run, model: Path, file: str, value: object):
    written = model / file
    content = json.loads(written.read_text()) if written.exists() else {}
    written.write_text(json.dumps(content | {"eos_token_id": value}))
    outcome = run("generate", model, "--prompt", "a", "--max-new-tokens", 2)
    assert (outcome.status, "unexpected" in outcome.err) == (2, False), outcome
    assert "eos_token_id" in outcome.err


def test_a_length_in_the_tokenizers_file_that_is_no_number(run: Run, model: Path):
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    assert_sentence(run("generate", model, "--prompt", "a"), "model_max_length is 'x' in tokenizer_config.json")


@pytest.mark.parametrize(
    "asked",
    mostly_slow([{"return_dict": False}, {"output_attentions": True}, {"output_hidden_states": True}], 1),
)
def test_outputs_that_a_config_asks_for_change_nothing(
    run: Run, model: Path, text: Path, tmp_path: Path, asked: dict[str, bool]
):
    plain = run("generate", model, "--prompt", "a", "--max-new-tokens", 5)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    assert run("generate", model, "--prompt", "a", "--max-new-tokens", 5).out == plain.out
    assert run("eval", model, "--text", text).status == 0
    outcome = run(
        "compress", model, "--recipe", "dense-w4", "--set", "tune=none", "--calib", text, "--out", tmp_path / "o"
    )
    assert outcome.status == 0, outcome


def test_no_shapes(run: Run):
    assert_sentence(run("bench", "kernels", "--shapes", " , "), "--shapes takes architectures")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% if %}", "{{ ''.__class__.__mro__ }}", "{{ x.y }}", "{{ 1 / 0 }}"]
)
def test_a_chat_template_that_fails(run: Run, compressed: Path, tmp_path: Path, monkeypatch, template: str):
    shutil.copytree(compressed, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    outcome = run("generate", tmp_path / "chat", "--chat", "--max-new-tokens", 2)
    assert_sentence(outcome, "the tokenizer's chat template refuses the conversation")


@pytest.mark.parametrize(
    ("glob", "known"), [("*.down_proj", True), ("model.layers.9.*", False), ("*q_proj,*k_proj", False)]
)
def test_an_ignored_layer_that_is_not_there_is_announced(run: Run, model: Path, tmp_path: Path, glob: str, known: bool):
    """A typo would compress what its user wanted to keep."""
    outcome = run("compress", model, *WITHOUT_CALIBRATION, "--set", f"ignore={glob}", "--out", tmp_path / "out")
    sentence = f"ignore: '{glob}' matches no layer of the model; an example is 'model.layers.0."
    assert outcome.status == 0, outcome
    assert (sentence in " ".join(outcome.err.split())) != known


def test_layers_without_digests_are_counted_and_an_impossible_density_is_not_shown(
    run: Run, compressed: Path, tmp_path: Path
):
    shutil.copytree(compressed, tmp_path / "small")
    file = tmp_path / "small" / "config.json"
    config = json.loads(file.read_text())
    first, second, *_ = config["quantization_config"]["layers"].values()
    del first["digests"]
    first["density"], second["density"] = 5, True
    file.write_text(json.dumps(config))
    outcome = run("inspect", tmp_path / "small", "--verify")
    assert "1 compressed layers have no digests in config.json" in " ".join(outcome.err.split())
    assert "5.0000" not in outcome.err
    assert "no digests" not in run("inspect", compressed, "--verify").err
    described = run("inspect", tmp_path / "small", "--json").json
    assert described["without_digests"] == 1
    assert [layer["density"] for layer in described["layers"][:3]].count(None) == 2
