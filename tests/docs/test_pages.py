"""Every command and program on the pages about serving runs, in the order in which a reader meets them."""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import foreign
from tests.conftest import Outcome
from tests.docs.pages import DOCS, blocks, commands, file_of
from tests.models import VOCABULARY, byte_tokenizer
from tests.serving import Served, one, write

TESTED = {"transformers.md", "vllm.md", "lm-eval.md", "quality.md", "exchange.md", "targets.md", "performance.md"}


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
    assert {page.name for page in DOCS.glob("*.md") if list(blocks(page.name))} == TESTED


def test_transformers(workdir: Path, run, monkeypatch: pytest.MonkeyPatch):
    compiled = torch.compile
    # Inductor's compiler takes a minute here; tracing is what a packed layer can break.
    monkeypatch.setattr(torch, "compile", lambda f, mode: compiled(f, backend="eager"))
    run_programs("transformers.md")
    for words in commands("transformers.md"):
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


def test_targets(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "MODEL")
    byte_tokenizer().save_pretrained(tmp_path / "MODEL")
    (tmp_path / "text.txt").write_text("".join(f"line {i}: some words\n" for i in range(100)))
    monkeypatch.chdir(tmp_path)
    for words in commands("targets.md"):
        words = ["decode=1x" if word == "decode=1.5x" else word for word in words]  # so small layers gain nothing
        run_command([*words, "--samples", "4", *(["--set", "search_effort=1"] if words[1] == "compress" else [])], run)
    assert {"MODEL", "front.png", "small", "fast"} <= {path.name for path in tmp_path.iterdir()}


def test_performance(run, tmp_path: Path):
    (words,) = commands("performance.md")
    words[words.index("--shapes") + 1], words[words.index("--tokens") + 1] = "64,64", "1"
    assert run_command([*words, "--out", str(tmp_path / "out.csv")], run) is not None


def test_quality(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The commands take hours: each must be a program that knows its arguments, and its CSV what the page shows."""
    root = DOCS.parent
    monkeypatch.syspath_prepend(root / "benchmarks")
    for words in commands("quality.md"):
        monkeypatch.setattr(sys, "argv", [*words[1:], "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(root / words[1]), run_name="__main__")
        assert words[1].rpartition("/")[2] in capsys.readouterr().out
        assert (root / words[3]).is_file()


def test_lm_eval(workdir: Path, run):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-serving sets it up")
    with contextlib.redirect_stdout(sys.stderr):
        found = run_programs("lm-eval.md")["found"]["results"]["sums"]
    install, evaluate = commands("lm-eval.md")
    run_command(install, run)
    shown = run_command(evaluate, run).json["tasks"]["sums"]
    # Four times the same question: whichever choice the model takes is right three times, or once.
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
    served = [words for words in commands("vllm.md") if words[:2] == ["vllm", "serve"]]
    assert len(served) == 2
    for words, count in zip(served, (1, 2), strict=True):
        options = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
        options.model = options.model_tag
        arguments = AsyncEngineArgs.from_cli_args(options)
        assert arguments.create_model_config().quantization == "semisparse"
        assert arguments.tensor_parallel_size == count
