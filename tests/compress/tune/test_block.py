"""Block-wise tuning in a model: it helps, keeps the pattern, touches nothing else, and survives an interruption."""

import copy
import fnmatch
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from semisparse.compress import Journal, LayerReport, Recipe, compress_blocks, fingerprint
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from tests.forked import exit_code
from tests.models import VOCABULARY, random_model

TUNED = Recipe(pattern="2:4", tune="bqpo", tune_epochs=2)


def calibration() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (count, length), generator=generator) for count, length in [(200, 20), (3, 9)]]


def tuned(model: PreTrainedModel, recipe: Recipe = TUNED, **options: object) -> list[LayerReport]:
    return compress_blocks(model, calibration(), recipe, seed=1, **options)  # type: ignore[arg-type]


def hidden_error(model: PreTrainedModel, dense: PreTrainedModel) -> float:
    generator = torch.Generator().manual_seed(9)
    batch = torch.randint(0, VOCABULARY, (40, 20), generator=generator)
    with torch.no_grad():
        ours, theirs = (m.float().base_model(batch)[0] for m in (model, dense))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [("llama", "2:4"), ("llama", "6:8"), ("llama", "8:16v8"), ("llama", "70%"), ("llama", "g4@50%"), ("gpt2", "2:4")],
)
def test_it_helps_on_other_tokens_and_keeps_the_pattern(architecture: str, pattern: str):
    dense, errors = random_model(architecture, torch.float32), []
    for tune in ("none", "bqpo"):
        model = copy.deepcopy(dense)
        reports = tuned(model, Recipe(pattern=pattern, prune="wanda", tune=tune, tune_epochs=5))
        for report in reports:
            weight = weight_of(model.get_submodule(report.name))
            parse_pattern(pattern).check(weight)
            assert report.density == int(weight.count_nonzero()) / weight.numel()
        errors.append(hidden_error(model, copy.deepcopy(dense)))
    assert errors[1] < 0.97 * errors[0]


def test_every_choice_of_pruning_can_be_tuned():
    for prune in ("magnitude", "wanda"):
        reports = tuned(random_model("opt"), Recipe(pattern="2:4", prune=prune, tune="bqpo", tune_epochs=1))
        assert all(report.outcome.startswith(f"{prune}, bqpo ") for report in reports)


def test_nothing_but_the_layers_is_changed():
    dense = random_model("llama-bias")
    model = copy.deepcopy(dense)
    tuned(model, Recipe(tune="bqpo", tune_epochs=1, ignore=("*.q_proj",)))
    untouched = ["*.bias", "*norm*", "*.q_proj.*", "lm_head.*", "*embed*"]
    for name, tensor in model.state_dict().items():
        same = any(fnmatch.fnmatchcase(name, glob) for glob in untouched)
        assert torch.equal(tensor, dense.state_dict()[name]) is same, name
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in dense.parameters()]


def test_what_it_did_is_said_and_the_order_of_batches_is_the_seeds():
    models = [random_model("llama") for _ in range(3)]
    reports = [
        compress_blocks(model, calibration(), TUNED, seed=seed) for model, seed in zip(models, (1, 1, 2), strict=True)
    ]
    same, other = (
        all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))
        for model in models[1:]
    )
    assert same
    assert not other
    assert {report.error for report in reports[0]} == {None}
    assert "sparsegpt, bqpo " in reports[0][0].outcome
    assert " steps" in reports[0][0].outcome


def test_progress_tells_the_steps():
    told: list[tuple[str, int, int]] = []
    tuned(random_model("llama"), progress=lambda *seen: told.append(seen))
    of_first = [(done, total) for stage, done, total in told if stage == "block 1 of 2, tuning"]
    assert of_first == [(done, len(of_first)) for done in range(len(of_first))]
    assert len(of_first) > 4


class Interrupted(Exception):
    pass


def resumed(directory: Path, progress=lambda *_: None) -> PreTrainedModel:
    model = random_model("llama")
    identity = fingerprint(model, calibration(), TUNED, seed=1, device="cpu")
    tuned(model, journal=Journal(directory, identity), progress=progress)
    return model


def same_bytes(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.mark.parametrize("block", [1, 2])
def test_interrupted_in_the_middle_of_a_block(tmp_path: Path, block: int):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == f"block {block} of 2, tuning" and done == total // 2:
            raise Interrupted

    uninterrupted = random_model("llama")
    tuned(uninterrupted)
    with pytest.raises(Interrupted):
        resumed(tmp_path, interrupt)
    stages: list[str] = []
    assert same_bytes(resumed(tmp_path, lambda stage, *_: stages.append(stage)), uninterrupted)
    assert ("block 1 of 2, tuning" in stages) is (block == 1)


def tune_until_killed(directory: Path) -> None:
    def kill(stage: str, done: int, total: int) -> None:
        if stage == "block 2 of 2, tuning" and done == total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    resumed(directory, kill)


def test_killed_in_the_middle_of_a_block(tmp_path: Path):
    uninterrupted = random_model("llama")
    tuned(uninterrupted)
    assert exit_code(tune_until_killed, tmp_path) == -signal.SIGKILL
    assert same_bytes(resumed(tmp_path), uninterrupted)
