"""End-to-end tuning: the loss falls, codes or zeros stay, and an interruption changes nothing."""

import copy
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from semisparse.compress import InPlace, Journal, LayerReport, Recipe, compress_decoder_layers, fingerprint
from semisparse.compress.tune.quantised import QuantisedLinear
from semisparse.errors import RecipeError
from semisparse.nn import weight_of
from semisparse.quant.group import scales_of
from tests.compress.checking import Interrupted, equal_weights, is_quantised
from tests.models import VOCABULARY, random_model

RECIPE = Recipe(pattern="g4@50%", quant="w4", prune="magnitude", tune="bqpo+e2e", tune_epochs=6, tune_rate=0.3)


def calibration(seed: int = 0, sequences: int = 100) -> list[torch.Tensor]:
    """Sequences that count up by one or two: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, high, (sequences, 1), generator=generator) for high in (20, 3))
    return [(start + step * torch.arange(20)) % VOCABULARY]


@functools.cache
def tuned(architecture: str, tune: str) -> tuple[PreTrainedModel, list[LayerReport]]:
    model = random_model(architecture)
    return model, compress_decoder_layers(model, calibration(), replace(RECIPE, tune=tune), seed=3)


def language_model_loss(model: PreTrainedModel) -> float:
    (tokens,) = calibration(seed=7)
    with torch.no_grad():
        logits = copy.deepcopy(model).float()(tokens).logits[:, :-1]
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def kl_to_dense(model: PreTrainedModel, architecture: str = "llama") -> float:
    (tokens,) = calibration(seed=7)
    with torch.no_grad():
        dense, own = (
            each.float()(tokens).logits[:, :-1].double() for each in (random_model(architecture), copy.deepcopy(model))
        )
    return float((dense.softmax(-1) * (dense.log_softmax(-1) - own.log_softmax(-1))).sum(-1).mean())


def test_on_kl_it_comes_nearer_to_the_dense_model():
    (before, first), (after, second) = tuned("llama", "bqpo"), tuned("llama", "bqpo+kl")
    assert kl_to_dense(after) < 0.98 * kl_to_dense(before)
    assert kl_to_dense(after) < kl_to_dense(tuned("llama", "bqpo+e2e")[0])
    for old, new in zip(first, second, strict=True):
        assert new.outcome.startswith(f"{old.outcome}, kl ")


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_distilled_weights_come_nearer_to_the_dense_model(architecture: str):
    (before, first), (scales_alone, _), (after, second) = (
        tuned(architecture, tune) for tune in ("bqpo", "bqpo+kl", "bqpo+distil")
    )
    untuned, end_to_end, distilled = (kl_to_dense(model, architecture) for model in (before, scales_alone, after))
    assert distilled < 0.95 * untuned
    if architecture == "llama":  # the random GPT-2's predictions hardly depend on its weights
        assert distilled < end_to_end
    for old, new in zip(first, second, strict=True):
        weights = [weight_of(model.get_submodule(old.name)) for model in (before, after)]
        groups = [weight.unflatten(1, (-1, 4)).any(-1) for weight in weights]
        assert not (groups[1] & ~groups[0]).any(), "the pruned groups stay"
        assert not torch.equal(*weights)
        assert is_quantised(weights[1].contiguous(), new.scales)
        assert new.outcome.startswith(f"{old.outcome}, distil ")
        assert new.density == int(weights[1].count_nonzero()) / weights[1].numel()


def test_weights_without_codes_are_distilled():
    kept = {}
    for tune in ("bqpo", "bqpo+distil"):
        model, recipe = random_model("llama"), Recipe("1:8", "magnitude", tune=tune, tune_epochs=6, tune_rate=0.1)
        reports = compress_decoder_layers(model, calibration(), recipe, seed=3)
        kept[tune] = model, [weight_of(model.get_submodule(report.name)) for report in reports]
    assert kl_to_dense(kept["bqpo+distil"][0]) < 0.95 * kl_to_dense(kept["bqpo"][0])
    for before, after in zip(kept["bqpo"][1], kept["bqpo+distil"][1], strict=True):
        assert torch.equal(before == 0, after == 0)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_it_lowers_the_loss_and_leaves_the_codes(architecture: str):
    (before, first), (after, second) = tuned(architecture, "bqpo"), tuned(architecture, "bqpo+e2e")
    assert language_model_loss(after) < language_model_loss(before) - 1e-4
    for old, new in zip(first, second, strict=True):
        weights = [weight_of(model.get_submodule(old.name)).contiguous() for model in (before, after)]
        codes = [report.scales.codes(weight) for report, weight in zip((old, new), weights, strict=True)]
        kept = weights[0].unflatten(1, (-1, 4)).any(-1)
        assert torch.equal(codes[0][kept], codes[1][kept])
        assert is_quantised(weights[1], new.scales)
        assert new.outcome.startswith(f"{old.outcome}, e2e ")


def test_nothing_else_is_changed():
    (before, _), (after, reports) = tuned("llama", "bqpo"), tuned("llama", "bqpo+e2e")
    layers = {f"{report.name}.weight" for report in reports}
    changed = {
        name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before.state_dict()[name])
    }
    assert changed <= layers
    assert len(changed) > len(layers) / 2
    assert all("_checkpoint" not in repr(module.forward) for module in after.modules())


def test_a_quantised_layer_computes_what_the_layer_did_that_it_replaces():
    for linear in (
        random_model("llama-bias").model.layers[0].mlp.up_proj,
        random_model("gpt2").transformer.h[0].mlp.c_fc,  # stores its weight transposed
    ):
        weight = weight_of(linear)
        weight[:, 4:8] = 0
        scales = scales_of(weight, 4, 4, torch.bfloat16)
        weight.copy_(scales.rounded(weight))
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        quantised = QuantisedLinear(linear, scales)
        torch.testing.assert_close(quantised(x.bfloat16()), linear(x.bfloat16()), atol=0.02, rtol=0.02)
        assert torch.equal(quantised.weight() + 0.0, weight + 0.0)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_it_needs_quantised_groups(quant: str):
    with pytest.raises(RecipeError, match=r"tune=bqpo\+e2e trains the scales of quantised groups"):
        Recipe(quant=quant, tune="bqpo+e2e")


def test_interrupted_in_the_middle(tmp_path: Path):
    def resume(progress=lambda *_: None) -> PreTrainedModel:
        model = random_model("llama")
        identity = fingerprint(calibration(), RECIPE, seed=3, device="cpu")
        compress_decoder_layers(
            model, calibration(), RECIPE, seed=3, store=InPlace(Journal(tmp_path, identity)), progress=progress
        )
        return model

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "tuning end to end" and done == total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        resume(interrupt)
    stages: list[str] = []
    model = resume(lambda stage, *_: stages.append(stage))
    assert not any("decoder layer" in stage and "tuning" in stage for stage in stages)
    assert equal_weights(model, tuned("llama", "bqpo+e2e")[0])
