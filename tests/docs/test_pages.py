"""Every command and program on the pages is run, in the order of the page, or at least parsed."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.core import TyperGroup

from semisparse import cli
from tests import foreign
from tests.conftest import Outcome
from tests.docs.pages import DOCS, blocks, commands, file_of, lines
from tests.models import VOCABULARY, byte_tokenizer
from tests.serving import Served, one, write

PAGES = ["../README.md", "../results/README.md", *(str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md")))]

TESTED = {
    "../README.md",
    "../results/README.md",  # measurements: parsed only
    "exchange.md",
    "serving/engine.md",
    "install.md",
    "large-models.md",
    "lm-eval.md",
    "performance.md",
    "quality.md",
    "quickstart.md",
    "several-gpus.md",
    "targets.md",
    "serving/transformers.md",
    "serving/vllm.md",
    "which-recipe.md",
}

QUICK = ("--samples", "4", "--seqlen", "32")
"""Added to commands that calibrate."""

EFFORT = ("--set", "search_effort=1", "--set", "tune=none")
"""Added to searches."""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a compressed model and data."""
    write(Served("small", "bitmask", one("32:64")), tmp_path / "small")
    (tmp_path / "tasks").mkdir()
    row = '{"question": "1 and 1 are", "choices": ["2", "3"], "answer": %d}\n'
    (tmp_path / "tasks" / "sums.jsonl").write_text("".join(row % answer for answer in (0, 0, 0, 1)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run_programs(page: str) -> dict[str, Any]:
    """Write a page's files and run its programs, in order. Return the namespace that the programs share."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        if name := file_of(block):
            Path(name).write_text(block.text)
        elif block.kind == "python":
            exec(compile(block.text, f"docs/{page}", "exec"), names)
    return names


def run_command(words: list[str], run) -> Outcome | None:
    """Run a command as a shell would, except pip. Return the outcome of a semisparse command."""
    if words[0] == "semisparse":
        outcome = run(*words[1:])
        assert outcome.status == 0, outcome.err
        return outcome
    if words[0] == "torchrun":
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:]], check=True, timeout=200)
    else:
        assert words[:2] == ["pip", "install"], words
    return None


def test_every_page_is_tested():
    assert {page for page in PAGES if any(block.kind != "bytes" for block in blocks(page))} == TESTED


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_parsed(page: str, monkeypatch: pytest.MonkeyPatch):
    """The command line's own parser takes every semisparse command; every make target exists."""
    targets = set(re.findall(r"^([a-z-]+):", (DOCS.parent / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "semisparse":
            parse(words[1:])
        elif words[0] == "make":
            assert words[1] in targets


def parse(words: list[str]) -> None:
    """Parse a command without running it."""
    command = typer.main.get_command(cli.app)
    context = command.make_context("semisparse", list(words))
    while isinstance(command, TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("words", [["compress", "a", "--to", "b"], ["export", "a"], ["bench", "speed"]])
def test_a_command_that_does_not_exist_is_found(words: list[str]):
    with pytest.raises(Exception, match=r"No such|Missing"):
        parse(words)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny dense model and texts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "MODEL")
    byte_tokenizer().save_pretrained(tmp_path / "MODEL")
    for name in ("text.txt", "held-out.txt"):
        (tmp_path / name).write_text("".join(f"line {i}: some words\n" for i in range(100)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(page: str, run, remove: bool = False) -> None:
    """Run a page's semisparse commands but `serve`, on little text; ``remove`` what an earlier one wrote."""
    for words in commands(page):
        if words[0] != "semisparse" or words[1] == "serve":
            continue
        if remove and "--out" in words:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        searched = "--target" in words
        run_command([*words, *(QUICK if "--calib" in words else ()), *(EFFORT if searched else ())], run)


def test_transformers(workdir: Path, run, monkeypatch: pytest.MonkeyPatch):
    compiled = torch.compile
    # Inductor's compiler takes a minute here; tracing is what a packed layer can break.
    monkeypatch.setattr(torch, "compile", lambda f, mode: compiled(f, backend="eager"))
    run_programs("serving/transformers.md")
    for words in commands("serving/transformers.md"):
        run_command(words, run)
    assert (workdir / "saved" / "model.safetensors").read_bytes() == (
        workdir / "small" / "model.safetensors"
    ).read_bytes()


def test_exchange(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    foreign.gptq(tmp_path / "theirs", foreign.model_of(torch.float16))
    foreign.int8(tmp_path / "pruned-int8", foreign.model_of(pattern=(6, 8)))
    monkeypatch.chdir(tmp_path)
    shown = commands("exchange.md")
    for words in shown:
        run_command(words, run)
    outputs = {words[words.index("--out") + 1] for words in shown}
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "pruned-int8", *outputs}


def test_targets(models: Path, run):
    for words in commands("targets.md"):
        words = ["decode=0.8x" if word == "decode=1.5x" else word for word in words]  # so small layers gain nothing
        run_command([*words, "--samples", "4", *(EFFORT[:2] if words[1] == "compress" else [])], run)
    assert {"MODEL", "front.png", "small", "fast"} <= {path.name for path in models.iterdir()}


def test_readme(models: Path, run):
    run_all("../README.md", run)
    names = {"weight": torch.ones(8, 64) * (torch.arange(64) % 2), "x": torch.ones(2, 64), "bias": torch.ones(8)}
    (program,) = [block.text for block in blocks("../README.md") if block.kind == "python"]
    quick = program.replace(
        'out="small"', 'out="again", settings=("tune=none", "search_effort=1"), samples=4, seqlen=32'
    )
    assert quick != program
    exec(compile(quick, "README.md", "exec"), names)
    assert names["y"].tolist() == [[33.0] * 8] * 2
    assert (models / "again" / "config.json").is_file()


def test_which_recipe(models: Path, run):
    model = AutoModelForCausalLM.from_pretrained(models / "MODEL")
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter.data.mul_(torch.arange(parameter.shape[1]) % 2)
    model.save_pretrained(models / "PRUNED")
    byte_tokenizer().save_pretrained(models / "PRUNED")
    run_all("which-recipe.md", run, remove=True)


def test_large_models(models: Path, run):
    run_all("large-models.md", run, remove=True)


def test_several_gpus(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in commands("several-gpus.md"):
        run_command([*words, *QUICK], None)
    assert (models / "small" / "config.json").exists()


@pytest.mark.slow
def test_the_program_for_ray(models: Path, monkeypatch: pytest.MonkeyPatch):
    """On one host, with two workers that have no GPU."""
    pytest.importorskip("ray.train")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOCS.parent), *sys.path]))
    [program] = [block.text for block in blocks("several-gpus.md") if file_of(block)]
    Path("compress_on_ray.py").write_text(program)
    words = [models / "MODEL", "rheosparse", models / "text.txt", models / "small", "2", "cpu"]
    subprocess.run([sys.executable, "compress_on_ray.py", *map(str, words)], check=True, timeout=900)
    assert (models / "small" / "config.json").exists()


def test_engine(workdir: Path, run):
    shutil.copytree(workdir / "small", workdir / "MODEL")  # any model with the same tokenizer
    run_all("serving/engine.md", run)
    assert run_programs("serving/engine.md")["first"].new_tokens == 16


def test_install():
    """Every extra that the page names exists, and none is left out."""
    described = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "install.md").read_text(), re.MULTILINE))
    _, _, extras = (DOCS.parent / "pyproject.toml").read_text().partition("optional-dependencies]")
    names = set(re.findall(r"^(\w+) = \[", extras.partition("[project.scripts]")[0], re.MULTILINE))
    assert described == names - {"test", "dev"}
    assert all(words[:2] == ["pip", "install"] for words in commands("install.md"))


@pytest.mark.slow
def test_quickstart(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    """Pasted line by line, on the model that ships with semisparse and a part of its text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for line, words in zip(lines("quickstart.md"), commands("quickstart.md"), strict=True):
        if words[0] == "cp":
            subprocess.run(line, shell=True, check=True)
        elif words[1] != "serve":
            quick = ("--samples", "2", *EFFORT, "--set", "search_tokens=256") if "--target" in words else ()
            run_command([*words, *(("--samples", "4") if "--calib" in words else ()), *quick], run)
    assert "y" in run_programs("quickstart.md")


def test_performance(run, tmp_path: Path):
    (words,) = commands("performance.md")
    words[words.index("--shapes") + 1], words[words.index("--tokens") + 1] = "64,64", "1"
    assert run_command([*words, "--out", str(tmp_path / "out.csv")], run) is not None


def test_quality(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The commands take hours, so only ``--help`` of each runs; its CSV must exist."""
    root = DOCS.parent
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.syspath_prepend(root / "scripts")
    for words in commands("quality.md"):
        monkeypatch.setattr(sys, "argv", [*words[1:], "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(root / words[1]), run_name="__main__")
        assert words[1].rpartition("/")[2] in capsys.readouterr().out
        assert words[1].startswith("scripts/") or (root / words[3]).is_file()


def test_lm_eval(workdir: Path, run):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-serving sets it up")
    with contextlib.redirect_stdout(sys.stderr):
        found = run_programs("lm-eval.md")["found"]["results"]["sums"]
    install, evaluate = commands("lm-eval.md")
    run_command(install, run)
    shown = run_command(evaluate, run).json["tasks"]["sums"]
    # The same question four times, with one choice right three times and the other once.
    assert found["acc,none"] in (0.75, 0.25)
    assert {name: shown[name] for name in ("acc,none", "acc_norm,none")} == {
        name: found[name] for name in ("acc,none", "acc_norm,none")
    }


def test_vllm(workdir: Path):
    """The server itself needs vLLM's compiled kernels; its command line must find a model it can load."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving sets it up")
    from tests.vllm import ranks

    ranks.prepare()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    served = [words for words in commands("serving/vllm.md") if words[:2] == ["vllm", "serve"]]
    settings = (
        {},
        {},
        {"semisparse_fusion": False},
        {"semisparse_attention": False},
        {"semisparse_keep_dense": ["*"]},
    )
    for words, count, wanted in zip(served, (1, 2, 1, 1, 1), settings, strict=True):
        options = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
        options.model = options.model_tag
        arguments = AsyncEngineArgs.from_cli_args(options)
        assert arguments.create_model_config().quantization == "semisparse"
        assert arguments.tensor_parallel_size == count
        assert arguments.additional_config == wanted
