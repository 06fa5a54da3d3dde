"""BQPO in a model lowers the error, keeps the pattern, changes nothing else, and can be interrupted and resumed."""

import copy
import fnmatch
import functools
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from semisparse.compress import (
    InPlace,
    Journal,
    LayerReport,
    Recipe,
    TuningResult,
    compress_decoder_layers,
    fingerprint,
)
from semisparse.compress.decoder import LayerCall, record_calls
from semisparse.compress.layers import DecoderLayer, list_decoder_layers
from semisparse.compress.trace import HookPoint, SharedInput, find_inputs
from semisparse.compress.tune import bqpo, submodules_of, tune_decoder_layer, tune_submodules
from semisparse.compress.tune.bqpo import Submodule
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from semisparse.quant.group import GroupScales, scales_of
from tests.compress.checking import Interrupted, equal_weights, hidden_error, is_quantised
from tests.forked import exit_code
from tests.models import VOCABULARY, random_model

RECIPE = Recipe(pattern="2:4", prune="wanda", tune="bqpo", tune_epochs=1)


def calibration() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (count, length), generator=generator) for count, length in [(200, 20), (3, 9)]]


OTHER_TOKENS = [torch.randint(0, VOCABULARY, (40, 20), generator=torch.Generator().manual_seed(9))]


def tune(model: PreTrainedModel, recipe: Recipe = RECIPE, seed: int = 1, **options: object) -> list[LayerReport]:
    return compress_decoder_layers(model, calibration(), recipe, seed=seed, **options)  # type: ignore[arg-type]


@functools.cache
def tuned(seed: int = 1) -> tuple[PreTrainedModel, list[LayerReport]]:
    """A tuned llama and its reports."""
    model = random_model("llama")
    return model, tune(model, seed=seed)


@pytest.mark.parametrize(
    ("architecture", "pattern", "prune"),
    [
        pytest.param("llama", "2:4", "magnitude", marks=pytest.mark.slow),
        pytest.param("llama", "8:16v8", "wanda", marks=pytest.mark.slow),
        ("llama", "70%", "wanda"),
        ("llama", "g4@50%", "sparsegpt"),
        ("gpt2", "2:4", "wanda"),
        ("opt", "6:8", "magnitude"),
    ],
)
def test_it_helps_on_other_tokens_and_keeps_the_pattern(architecture: str, pattern: str, prune: str):
    dense, errors = random_model(architecture, torch.float32), []
    for stage, epochs in (("none", 1), ("bqpo", 3)):
        model = copy.deepcopy(dense)
        reports = tune(model, Recipe(pattern=pattern, prune=prune, tune=stage, tune_epochs=epochs))
        for report in reports:
            weight = weight_of(model.get_submodule(report.name))
            parse_pattern(pattern).check(weight)
            assert report.density == int(weight.count_nonzero()) / weight.numel()
            assert report.outcome.startswith(prune if stage == "none" else f"{prune}, bqpo ")
        errors.append(hidden_error(model, dense, OTHER_TOKENS))
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize(("architecture", "pattern"), [("llama", "2:4"), ("gpt2", "g4@50%")])
def test_submodules_one_after_the_other(architecture: str, pattern: str):
    dense, errors = random_model(architecture, torch.float32), []
    plain = Recipe(pattern=pattern, prune="wanda", quant="w4" if pattern.startswith("g") else "none")
    for recipe in (plain, replace(plain, tune="bqpo", tune_units="submodules", tune_epochs=3)):
        model = copy.deepcopy(dense)
        for report in tune(model, recipe):
            weight = weight_of(model.get_submodule(report.name))
            parse_pattern(pattern).check(weight)
            assert report.scales is None or is_quantised(weight, report.scales)
        errors.append(hidden_error(model, dense, OTHER_TOKENS))
    assert errors[1] < 0.95 * errors[0]


def decoder_layer(architecture: str) -> tuple[DecoderLayer, list[LayerCall], list[torch.Tensor]]:
    """The first decoder layer of a random model, with its calls and hidden states."""
    model = random_model(architecture, torch.float32)
    layers = list_decoder_layers(model, RECIPE, {})
    hidden: list[torch.Tensor] = []
    calls = record_calls(model, [layer.module for layer in layers], OTHER_TOKENS, hidden.append)
    return layers[0], calls[0], hidden


def test_submodules_of_a_llama_are_its_attention_and_its_mlp():
    layer, calls, hidden = decoder_layer("llama")
    names = {name: layer.full_name(name) for name in layer.patterns}
    attention, mlp = submodules_of(find_inputs(layer.module, names, calls[0], hidden[0]))
    assert {name.partition(".")[0] for name in attention.linears} == {"self_attn"}
    assert {name.partition(".")[0] for name in mlp.linears} == {"mlp"}
    assert len(attention.linears) + len(mlp.linears) == len(names)
    kwargs = {**calls[0].kwargs, "hidden_states": layer.module.input_layernorm(hidden[0])}
    expected = hidden[0] + layer.module.self_attn(**kwargs)[0]
    torch.testing.assert_close(attention.after(layer.module, calls[0], hidden[0]), expected.flatten(0, 1))
    expected = calls[0](layer.module, hidden[0])
    torch.testing.assert_close(mlp.after(layer.module, calls[0], hidden[0]), expected.flatten(0, 1))


def test_one_submodule_where_no_sum_can_be_read():
    inputs = [SharedInput(("q", "up"), {}, True), SharedInput(("down",), {}, True)]
    assert submodules_of(inputs) == [Submodule(("q", "up", "down"), None)]
    inputs = [SharedInput(("up",), {}, True), SharedInput(("down",), {"down": HookPoint("", "input")}, True)]
    assert submodules_of(inputs) == [Submodule(("up", "down"), None)]


def test_attention_is_trained_before_the_mlp():
    layer, calls, hidden = decoder_layer("llama")
    states = list(hidden[0].split(8))
    names = {name: layer.full_name(name) for name in layer.patterns}
    parts = submodules_of(find_inputs(layer.module, names, calls[0], states[0]))
    pruned = copy.deepcopy(layer.module)
    for name in names:
        weight = weight_of(pruned.get_submodule(name)).detach()
        weight *= torch.arange(weight.shape[1]) % 4 > 1
    tuned_alone, tuned_both = copy.deepcopy(pruned), copy.deepcopy(pruned)
    steps: list[tuple[int, int]] = []
    for working, some in ((tuned_alone, parts[:1]), (tuned_both, parts)):
        steps.clear()
        result, _ = tune_submodules(
            working,
            layer.module,
            some,
            {name: None for part in some for name in part.linears},
            calls * len(states),
            states,
            states,
            rate=0.03,
            epochs=2,
            seed=0,
            progress=lambda *step: steps.append(step),
        )
        assert result.after < result.before
        assert steps == [(done, result.steps) for done in range(result.steps)]
    for name in names:
        before, alone, both = (weight_of(m.get_submodule(name)) for m in (pruned, tuned_alone, tuned_both))
        assert torch.equal(alone, both) is name.startswith("self_attn")
        assert torch.equal(alone, before) is name.startswith("mlp")


def tiny_layer() -> tuple[nn.Module, dict[str, GroupScales], torch.Tensor, torch.Tensor]:
    """A linear layer in groups of 4 bits, an input [1, 8 tokens, 16], and targets whose norms differ by 1,000."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 16, generator=generator)
    x = torch.randn(1, 8, 16, generator=generator)
    target = x @ weight.T * torch.logspace(-2, 1, 8)[:, None]
    layer = nn.Sequential(nn.Linear(16, 12, bias=False))
    scales = scales_of(weight, 4, 8, torch.float32)
    layer[0].weight.data = scales.rounded(weight)
    return layer, {"0": scales}, x, target


def tune_tiny(epochs: int, rate: float) -> tuple[TuningResult, nn.Module, GroupScales]:
    layer, scales, x, target = tiny_layer()
    calls = [lambda module, hidden: module(hidden)] * 4
    result, new = tune_decoder_layer(layer, scales, calls, [x] * 4, [target] * 4, rate=rate, epochs=epochs, seed=0)
    return result, layer, new["0"]


def test_the_loss_of_a_token_is_relative_to_its_target():
    layer, _, x, target = tiny_layer()
    with torch.no_grad():
        error = (layer(x) - target).double()
    expected = float((error.square().sum(-1) / target.double().square().sum(-1)).mean())
    assert tune_tiny(epochs=1, rate=1e-6)[0].before == pytest.approx(expected, rel=1e-5)


def test_scales_and_zero_points_are_trained_with_the_weights():
    _, scales, _, _ = tiny_layer()
    result, layer, new = tune_tiny(epochs=120, rate=0.03)
    assert result.after < result.before
    assert (new.scale != scales["0"].scale).float().mean() > 0.9
    assert (new.zero != scales["0"].zero).any()
    assert (new.scale / scales["0"].scale - 1).abs().max() < 0.5, "in small steps"
    assert is_quantised(layer[0].weight.detach(), new)


@pytest.mark.parametrize(("dropped", "rate"), [(0, 0.4), (3, 0.4), (4, 2.0), (8, 2.0)])
def test_codes_move_faster_where_groups_are_dropped(dropped: int, rate: float):
    """Of 16 groups."""
    linear = nn.Linear(8, 8, bias=False)
    weight = torch.ones(16, 4)
    weight[:dropped] = 0
    linear.weight.data = weight.view(8, 8)
    assert bqpo._weight_rate(linear, scales_of(linear.weight.detach(), 4, 4, torch.float32)) == rate


def test_eight_bits_train_like_sixteen():
    weight = torch.eye(8)
    linear = nn.Linear(8, 8, bias=False)
    linear.weight.data = weight
    assert bqpo._weight_rate(linear, scales_of(weight, 8, 4, torch.float32)) == bqpo._weight_rate(linear, None) == 1


def test_nothing_but_the_linear_layers_is_changed():
    dense = random_model("llama-bias")
    model = copy.deepcopy(dense)
    tune(model, Recipe(pattern="2:4", prune="wanda", tune="bqpo", tune_epochs=1, ignore=("*.q_proj",)))
    untouched = ["*.bias", "*norm*", "*.q_proj.*", "lm_head.*", "*embed*"]
    for name, tensor in model.state_dict().items():
        same = any(fnmatch.fnmatchcase(name, glob) for glob in untouched)
        assert torch.equal(tensor, dense.state_dict()[name]) is same, name
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in dense.parameters()]


def test_the_order_of_the_batches_depends_on_the_seed():
    again = random_model("llama")
    reports = tune(again)
    assert equal_weights(tuned()[0], again)
    assert not equal_weights(tuned()[0], tuned(seed=2)[0])
    assert {report.error for report in reports} == {None}


def test_progress_and_results_are_reported():
    calls: list[tuple[str, int, int]] = []
    results: dict[str, TuningResult] = {}
    reports = tune(random_model("llama"), progress=lambda *call: calls.append(call), on_tuned=results.__setitem__)
    in_first = [(done, total) for stage, done, total in calls if stage == "decoder layer 1 of 2, tuning"]
    assert in_first == [(done, len(in_first)) for done in range(len(in_first))]
    assert list(results) == ["decoder layer 1 of 2", "decoder layer 2 of 2"]
    first, second = results.values()
    assert first.steps == len(in_first) > 3
    assert first.after < first.before
    assert [report.outcome for report in reports] == [
        *[f"wanda, bqpo {first.outcome}"] * 7,
        *[f"wanda, bqpo {second.outcome}"] * 7,
    ]


def resume(directory: Path, progress=lambda *_: None) -> PreTrainedModel:
    model = random_model("llama")
    identity = fingerprint(calibration(), RECIPE, seed=1, device="cpu")
    tune(model, store=InPlace(Journal(directory, identity)), progress=progress)
    return model


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_interrupted_in_the_middle_of_a_decoder_layer(tmp_path: Path, layer: int):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == f"decoder layer {layer} of 2, tuning" and done == total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        resume(tmp_path, interrupt)
    stages: list[str] = []
    assert equal_weights(resume(tmp_path, lambda stage, *_: stages.append(stage)), tuned()[0])
    assert ("decoder layer 1 of 2, tuning" in stages) is (layer == 1)


def tune_until_killed(directory: Path) -> None:
    def kill(stage: str, done: int, total: int) -> None:
        if stage == "decoder layer 2 of 2, tuning" and done == total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    resume(directory, kill)


def test_killed_in_the_middle_of_a_decoder_layer(tmp_path: Path):
    assert exit_code(tune_until_killed, tmp_path) == -signal.SIGKILL
    assert equal_weights(resume(tmp_path), tuned()[0])
