"""What a step takes beside its linear layers, by hand, and a matmul's time in the engine."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from semisparse.bench import step
from semisparse.bench.machines import Machine, find_machine
from semisparse.bench.roofline import Candidate, estimate_matmul
from semisparse.bench.shapes import architecture
from semisparse.bench.step import CONTEXT, beside_seconds, in_engine

TOY = Machine("toy", "invented", 1e12, {"tensor fp16": 1e14, "fp32": 1e13}, 1e-6)
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=3000,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=50_000,
)
HEAD = 2 * 50_000 * 1024  # bytes


def test_a_decode_step_reads_the_cache_and_the_head():
    cache = 2 * CONTEXT * 4 * 64 * 2  # keys and values
    head = HEAD + 2 * (50_000 + 1024)
    expected = 3 * (cache / 1e12 + 1e-6) + head / 1e12 + 1e-6 + 2e-6
    assert beside_seconds(CONFIG, 1, False, torch.bfloat16, TOY) == pytest.approx(expected)


def test_many_sequences_have_kernels_for_norms_and_silu():
    cache = 32 * 2 * CONTEXT * 4 * 64 * 2
    hidden, inner = 32 * 1024 * 2, 32 * 3000 * 2
    head = HEAD + 32 * 2 * (50_000 + 1024)
    layer = cache + 3 * 4 * hidden + 3 * inner
    expected = 3 * (layer / 1e12 + 5e-6) + head / 1e12 + 1e-6 + 2e-6
    assert beside_seconds(CONFIG, 32, False, torch.bfloat16, TOY) == pytest.approx(expected)


def test_a_prompt_attends_to_half_of_all_pairs_and_needs_one_row_of_logits():
    m = 8192
    attention = 4 * m * m / 2 * 16 * 64 / (0.5 * 1e14)
    moved = (3 * 4 * m * 1024 * 2 + 3 * m * 3000 * 2) / 1e12
    head = (HEAD + 2 * (50_000 + 1024)) / 1e12 + 1e-6
    expected = 3 * (attention + moved + 5e-6) + head + 2e-6
    assert beside_seconds(CONFIG, m, True, torch.bfloat16, TOY) == pytest.approx(expected)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which a matmul takes some ratio of its time alone, on a machine of its own."""
    rows = ["gpu,arch,layers,format,pattern,variant,m,us"]
    for layers, form, pattern, kind, m, ratio in MEASURED:
        config = architecture("llama2-7b")
        config.num_hidden_layers = layers
        one = Candidate(form, pattern, {"on_gpu" if form == "ec_csr" else "kind": kind})
        shapes = ((3 * 4096, 4096), (4096, 4096), (2 * 11008, 4096), (4096, 11008))
        alone = layers * sum(estimate_matmul(one, m, n, k, torch.bfloat16, TOY)[0].seconds for n, k in shapes)
        seconds = beside_seconds(config, m, m > 1, torch.bfloat16, TOY) + ratio * alone
        rows.append(f"toy,llama2-7b,{layers},{form},{pattern},{kind},{m},{1e6 * seconds}")
    rows.append("other,llama2-7b,8,gqs,g128@0%,w2,1,1000000")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(step, "STEPS", path)
    step._steps.cache_clear()
    yield
    step._steps.cache_clear()


MEASURED = (
    (8, "gqs", "g128@0%", "w4", 1, 1.1),
    (32, "gqs", "g32@0%", "w4", 1, 1.3),
    (4, "gqs", "g16@50%", "w4", 1, 1.5),
    (8, "gqs", "g128@0%", "w4", 2048, 0.9),
    (4, "ec_csr", "70%", "lists", 1, 1.7),
)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(
    ("pattern", "kind", "m", "expected"),
    [
        ("g128@0%", "w4", 1, 1.1),
        ("g64@0%", "w4", 1, 1.1),  # of 32 and 128 as near: the first by name
        ("g32@0%", "w4", 2, 1.3),
        ("g16@20%", "w4", 1, 1.5),  # a pattern with zeros has other kernels than one without
        ("g128@0%", "w4", 32, 1.0),  # neither a decode step of one token nor a prompt
        ("g128@0%", "w4", 4096, 0.9),
        ("g16@50%", "w4", 2048, 1.0),  # nothing measured for prompts
        ("g128@0%", "w2", 1, 1.0),  # measured on another GPU
        ("32:64", "w4", 1, 1.0),
    ],
)
def test_a_matmul_takes_what_it_takes_in_the_nearest_measured_step(pattern: str, kind: str, m: int, expected: float):
    form = "bitmask" if ":" in pattern else "gqs"
    seconds = in_engine(Candidate(form, pattern, {"kind": kind}), 2.0, m, torch.bfloat16, TOY)
    assert seconds == pytest.approx(2 * expected)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("options", "expected"), [({"on_gpu": "lists"}, 1.7), ({}, 1.0)])
def test_a_variant_is_what_the_format_is_tuned_by(options: dict[str, str], expected: float):
    assert in_engine(Candidate("ec_csr", "70%", options), 2.0, 1, torch.bfloat16, TOY) == pytest.approx(2 * expected)


def test_shipped_steps_give_plausible_ratios():
    machine = find_machine("h200")
    steps = step._steps(machine.name)
    assert len({(row.format, row.pattern, row.variant, row.m) for row in steps}) == len(steps) > 0
    ratios = [in_engine(row.candidate, 1.0, row.m, torch.bfloat16, machine) for row in steps]
    assert all(0.5 < ratio < 2 for ratio in ratios)
