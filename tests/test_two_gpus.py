"""Two GPUs in one process: commands on the second one, engines on both, and one model whose layers are on both."""

import json
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import semisparse
from semisparse.checkpoint import load_tokenizer
from semisparse.cli import app
from semisparse.demo import CALIBRATION, CHOSEN, HELD_OUT, MODEL
from semisparse.engine import Engine, Sampling
from tests.models import byte_tokenizer, random_model
from tests.serving import Served, every_format, write

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = ["Once upon a time", "The dog"]


@pytest.fixture(autouse=True)
def first_gpu_is_current():
    """Tests begin on the first GPU, and leave it current for those of other files."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def run(*arguments: str) -> dict:
    """Return what a command prints with --json; it runs in this process."""
    outcome = CliRunner().invoke(app, [*arguments, "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def taken(gpu: int) -> int:
    """Return the most memory that torch took of a GPU since the last reset, beside what it had before."""
    return torch.cuda.max_memory_allocated(gpu)


@pytest.mark.parametrize("directory", [MODEL, CHOSEN], ids=["dense", "compressed"])
def test_generate_on_the_second_gpu(directory: Path):
    arguments = ("generate", str(directory), "--prompt", "Once upon a time", "--max-new-tokens", "40")
    first = run(*arguments, "--device", "cuda:0")["text"]
    torch.cuda.reset_peak_memory_stats(0)
    held = taken(0)
    assert run(*arguments, "--device", "cuda:1")["text"] == first
    assert taken(0) == held


@pytest.mark.parametrize("recipe", ["rheosparse", "gqsa", "slidesparse", "ec-spmv", "nm-spmm"])
def test_compress_on_the_second_gpu(recipe: str, tmp_path: Path):
    settings = {"rheosparse": ("search=none",), "gqsa": ("tune_epochs=1",)}.get(recipe, ())
    for device in ("cuda:0", "cuda:1"):
        semisparse.compress(
            random_model("llama"), byte_tokenizer(), recipe, ["some words to read " * 9] * 40, tmp_path / device,
            settings=settings, samples=8, seqlen=32, device=device,
        )  # fmt: skip
    weights = [(tmp_path / device / "model.safetensors").read_bytes() for device in ("cuda:0", "cuda:1")]
    assert weights[0] == weights[1]


def test_compress_as_a_command_on_the_second_gpu(tmp_path: Path):
    torch.cuda.reset_peak_memory_stats(0)
    held, out = taken(0), tmp_path / "small"
    settings = ("--set", "search=none", "--calib", str(CALIBRATION), "--samples", "8")
    found = run("compress", str(MODEL), "--recipe", "rheosparse", *settings, "--device", "cuda:1", "--out", str(out))
    assert found["bytes_after"] < found["bytes_before"]
    assert taken(0) == held


def test_bench_on_the_second_gpu(tmp_path: Path):
    torch.cuda.reset_peak_memory_stats(0)
    held = taken(0)
    shapes = ("--shapes", "512,512", "--tokens", "1,64")
    kernels = run("bench", "kernels", *shapes, "--formats", "dense,bitmask,slide24", "--device", "cuda:1")
    assert kernels
    run("bench", "model", str(CHOSEN), "--prompt", "32", "--new", "8", "--device", "cuda:1")
    assert taken(0) == held


def test_engines_on_both_gpus_in_turns_and_at_once():
    """Neither the first GPU being current nor the other engine's batches change a text; graphs are captured on both."""
    engines = [Engine(CHOSEN, device=f"cuda:{gpu}") for gpu in range(2)]
    torch.cuda.set_device(0)
    expected = [one.text for one in engines[0].generate(PROMPTS, 48)]
    for engine in (engines[1], engines[0], engines[1]):
        assert [one.text for one in engine.generate(PROMPTS, 48)] == expected
        assert torch.cuda.current_device() == 0
    drawn = [[one.text for one in engine.generate(PROMPTS, 48, sampling=Sampling(1.0, seed=3))] for engine in engines]
    assert drawn[0] == drawn[1]
    found: list[list[list[str]]] = [[], []]

    def generate(gpu: int) -> None:
        for _ in range(8):
            found[gpu].append([one.text for one in engines[gpu].generate(PROMPTS, 48, proposals=4 * gpu)])

    threads = [threading.Thread(target=generate, args=(gpu,)) for gpu in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 8] * 2


def test_a_model_moved_to_the_second_gpu_computes_the_same():
    model, ids = semisparse.load(CHOSEN, "cuda:0"), torch.arange(40)[None]
    torch.cuda.set_device(0)
    first = model(ids.to("cuda:0")).logits.cpu()
    moved = model.to("cuda:1")
    assert torch.equal(moved(ids.to("cuda:1")).logits.cpu(), first)
    assert torch.equal(moved.to("cuda:0")(ids.to("cuda:0")).logits.cpu(), first)


@pytest.mark.parametrize("served", every_format(), ids=lambda served: served.name)
def test_layers_on_two_gpus(served: Served, tmp_path: Path):
    """accelerate's hooks move activations from one GPU to the other; `device_map` says which layers are where."""
    fields = {**served.config.to_dict(), "num_hidden_layers": 2, "layer_types": None}
    config = type(served.config)(**fields)
    served = Served(served.name, served.format, served.pattern, served.options, config, served.dense)
    directory = write(served, tmp_path / served.folder)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "lm_head": 1}
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", device_map={"": 0})
    split = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", device_map=places)
    assert {parameter.device.index for parameter in split.parameters()} == {0, 1}
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0)).to("cuda:0")
    assert torch.equal(split(ids).logits.cpu(), whole(ids).logits.cpu())
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(ids, **greedy).cpu(), whole.generate(ids, **greedy).cpu())
    assert torch.cuda.current_device() == 0


def test_layers_divided_by_accelerate(tmp_path: Path):
    """`balanced` divides by bytes, which for packed layers are those of their tensors."""
    whole = AutoModelForCausalLM.from_pretrained(CHOSEN, dtype="auto", device_map={"": 0})
    split = AutoModelForCausalLM.from_pretrained(CHOSEN, dtype="auto", device_map="balanced")
    assert {parameter.device.index for parameter in split.parameters()} == {0, 1}
    ids = load_tokenizer(CHOSEN)(HELD_OUT.read_text()[:400], return_tensors="pt").input_ids.to("cuda:0")
    assert torch.equal(split(ids).logits.cpu(), whole(ids).logits.cpu())
