"""End-to-end tuning: the codes stay, the loss on the model's own task falls, and an interruption changes nothing."""

import copy
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from semisparse.compress import Journal, LayerReport, Recipe, compress_blocks, fingerprint
from semisparse.compress.tune.rounded import CodedLinear
from semisparse.errors import RecipeError
from semisparse.formats import registry
from semisparse.nn import weight_of
from semisparse.quant.group import scales_of
from tests.models import VOCABULARY, random_model

RECIPE = Recipe(pattern="g4@50%", quant="w4", prune="magnitude", tune="bqpo+e2e", tune_epochs=6, tune_rate=0.3)


def calibration(seed: int = 0, sequences: int = 100) -> list[torch.Tensor]:
    """Sequences that count upwards by one or two, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, high, (sequences, 1), generator=generator) for high in (20, 3))
    return [(start + step * torch.arange(20)) % VOCABULARY]


@functools.cache
def finished(architecture: str, tune: str) -> tuple[PreTrainedModel, list[LayerReport]]:
    model = random_model(architecture)
    return model, compress_blocks(model, calibration(), replace(RECIPE, tune=tune), seed=3)


def task_loss(model: PreTrainedModel) -> float:
    (tokens,) = calibration(seed=7)
    with torch.no_grad():
        logits = copy.deepcopy(model).float()(tokens).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_it_lowers_the_loss_and_leaves_the_codes(architecture: str):
    (before, first), (after, second) = finished(architecture, "bqpo"), finished(architecture, "bqpo+e2e")
    assert task_loss(after) < task_loss(before) - 1e-4
    for old, new in zip(first, second, strict=True):
        weights = [weight_of(model.get_submodule(old.name)).contiguous() for model in (before, after)]
        codes = [report.scales.codes(weight) for report, weight in zip((old, new), weights, strict=True)]
        kept = weights[0].unflatten(1, (-1, 4)).any(-1)
        assert torch.equal(codes[0][kept], codes[1][kept])
        packed = registry()["gqs"].pack(weights[1], new.pattern, kind="w4", scales=new.scales)
        assert torch.equal(packed.unpack() + 0.0, weights[1] + 0.0)
        assert new.outcome.startswith(f"{old.outcome}, e2e ")


def test_nothing_else_is_changed():
    (before, _), (after, reports) = finished("llama", "bqpo"), finished("llama", "bqpo+e2e")
    layers = {f"{report.name}.weight" for report in reports}
    changed = {
        name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before.state_dict()[name])
    }
    assert changed <= layers
    assert len(changed) > len(layers) / 2
    assert all("_checkpoint" not in repr(module.forward) for module in after.modules())


def test_a_coded_layer_multiplies_as_the_layer_it_stands_for():
    for linear in (
        random_model("llama-bias").model.layers[0].mlp.up_proj,
        random_model("gpt2").transformer.h[0].mlp.c_fc,
    ):
        weight = weight_of(linear)
        weight[:, 4:8] = 0
        scales = scales_of(weight, 4, 4, torch.bfloat16)
        weight.copy_(scales.rounded(weight))
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        coded = CodedLinear(linear, scales)
        torch.testing.assert_close(coded(x.bfloat16()), linear(x.bfloat16()), atol=0.02, rtol=0.02)
        assert torch.equal(coded.weight() + 0.0, weight + 0.0)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_it_needs_rounded_groups(quant: str):
    with pytest.raises(RecipeError, match=r"tune=bqpo\+e2e trains the scales of rounded groups"):
        Recipe(quant=quant, tune="bqpo+e2e")


class Interrupted(Exception):
    pass


def test_interrupted_in_the_middle(tmp_path: Path):
    def resumed(progress=lambda *_: None) -> PreTrainedModel:
        model = random_model("llama")
        identity = fingerprint(model, calibration(), RECIPE, seed=3, device="cpu")
        compress_blocks(model, calibration(), RECIPE, seed=3, journal=Journal(tmp_path, identity), progress=progress)
        return model

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "tuning end to end" and done == total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        resumed(interrupt)
    stages: list[str] = []
    model = resumed(lambda stage, *_: stages.append(stage))
    assert not any("block" in stage and "tuning" in stage for stage in stages)
    expected = finished("llama", "bqpo+e2e")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
