"""The joint search keeps its limits, scores what it returns, repeats bit for bit and survives interruptions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from semisparse.compress import Choice, Journal, Option, Recipe
from semisparse.compress.search import joint, losses
from semisparse.compress.search.allocate import Unreachable
from semisparse.compress.search.dominated import costs_no_more
from semisparse.compress.search.joint import JointResult, JointSearch, search_choices
from semisparse.compress.search.losses import ChoiceLosses
from semisparse.compress.search.masked import MaskedWeight, to_dense
from semisparse.compress.search.score import Scorer, split_sequences
from semisparse.compress.search.units import LinearChoices
from semisparse.errors import InputError
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from tests.choosing import mostly_slow
from tests.compress.checking import Interrupted
from tests.compress.search.small import calibration, mean_kl, sharp_model

RECIPE = Recipe(
    pattern="0%",
    prune="magnitude",
    search="joint",
    search_units="inputs",
    targets=(("bits", 4.0),),
    search_tokens=10_000,
    search_effort=32,
)
MENU = {("0%", "none"): 16.0, ("g8@0%", "w8"): 9.0, ("g8@0%", "w4"): 5.0, ("g8@0%", "w2"): 3.0, ("50%", "none"): 12.0}
LIMITS = {"bits": 4.0 / 16}
SCORED = [sequence[None] for sequence in split_sequences(calibration(), RECIPE.search_tokens, seed=0)[0]]
"""What candidates are scored on: a third of the text, because it holds fewer tokens than the search wants."""


def options(shapes: Sequence[tuple[int, int]]) -> list[Option]:
    weights = sum(n * k for n, k in shapes)
    return [Option(Choice(*key, "any"), {"bits": bits * weights}) for key, bits in MENU.items()]


def search(limits: dict[str, float] = LIMITS, **more: object) -> JointResult:
    return search_choices(sharp_model(), calibration(), RECIPE, options, limits, seed=0, **more)


@cache
def searched() -> JointResult:
    return search()


def test_the_limit_is_kept_by_layers_that_share_an_input_alike():
    result = searched()
    shapes = {name: tuple(weight_of(sharp_model().get_submodule(name)).shape) for name in result.choices}
    bits = sum(MENU[c.pattern, c.quant] * shapes[name][0] * shapes[name][1] for name, c in result.choices.items())
    dense = sum(16 * n * k for n, k in shapes.values())
    assert bits / dense == pytest.approx(result.predicted["bits"])
    assert result.predicted["bits"] <= LIMITS["bits"] * (1 + 1e-9)
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        assert len({result.choices[f"{attention}.{name}_proj"] for name in "qkv"}) == 1
    assert len(set(result.choices.values())) > 1
    assert {choice.quant for choice in result.choices.values()} <= {"w8", "w4", "w2"}


def test_a_target_of_bits_lets_each_linear_layer_choose():
    chosen = {True: ("bits", 4.0), False: ("decode", 1.5)}
    for alone, target in chosen.items():
        recipe = replace(RECIPE, search_units="auto", targets=(target,))
        found = ChoiceLosses(
            sharp_model(),
            calibration(),
            recipe,
            options,
            seed=0,
            device="cpu",
            progress=lambda stage, done, total: None,
            journal=None,
        )
        units = [unit.linears for unit in found.units if unit.decoder_layer == 0]
        assert sorted(name for unit in units for name in unit) == sorted({name for unit in units for name in unit})
        assert (max(map(len, units)) == 1) is alone


def test_the_first_decoder_layer_may_be_left_out():
    recipe = replace(RECIPE, ignore=("*layers.0.*",))
    result = search_choices(sharp_model(), calibration(), recipe, options, LIMITS, seed=0)
    assert {name.split(".")[2] for name in result.choices} == {"1"}


def test_nothing_is_better_than_dense(monkeypatch: pytest.MonkeyPatch):
    """Rounding errors of the sums must not make an option that changes nothing look better than the dense model."""
    measured, lower = Scorer.mean_kl, count()  # every candidate looks better than all before it
    monkeypatch.setattr(Scorer, "mean_kl", lambda self, scores: measured(self, scores) - next(lower))
    found = ChoiceLosses(
        sharp_model(),
        calibration(),
        RECIPE,
        options,
        seed=0,
        device="cpu",
        progress=lambda stage, done, total: None,
        journal=None,
    )
    measured = found.single_losses()
    assert all(min(unit) >= 0 for unit in measured)
    assert min(found.uniform_kl.values()) >= 0


def test_the_weights_obey_their_choices_and_have_the_reported_divergence():
    result, dense, compressed = searched(), sharp_model(), sharp_model()
    for name, choice in result.choices.items():
        weight = weight_of(compressed.get_submodule(name))
        weight.data.copy_(to_dense(result.weights[name], weight))
        parse_pattern(choice.pattern).check(weight)
        if choice.quant == "w2":
            groups = weight[:, : weight.shape[1] // 8 * 8].unflatten(1, (-1, 8))
            assert max(len(group.unique()) for row in groups for group in row) <= 5  # 4 codes, and exact zeros
    assert mean_kl(dense, compressed, SCORED) == pytest.approx(result.kl, rel=1e-4)


def test_dominated_choices_are_dropped_and_the_best_single_one_is_named():
    result = searched()
    assert result.uniform is not None
    assert result.uniform[0] == "any w2 g8@0%"  # the only choice of at most 4 bits
    run = ChoiceLosses(
        sharp_model(), calibration(), RECIPE, options, seed=0, device="cpu", progress=lambda *_: None, journal=None
    )
    run.measure(run.costs.dense)
    kls = {choice.label: kl for choice, kl in run.uniform_kl.items()}
    assert kls["any 50%"] > losses.DOMINATED * kls["any w8 g8@0%"]  # costs more, loses more
    assert all(2 not in layer.wanted or layer.choices[2].quant == "w4" for layer in run._space)
    assert all(4 not in layer.wanted for layer in run._space)


def test_a_choice_that_is_cheaper_in_one_unit_is_kept():
    run = ChoiceLosses(
        sharp_model(), calibration(), RECIPE, options, seed=0, device="cpu", progress=lambda *_: None, journal=None
    )
    uniforms = {choice.label: picks for choice, picks in run.costs.uniforms().items()}
    cheap, dear = uniforms["any w4 g8@0%"], uniforms["any w8 g8@0%"]
    assert costs_no_more(cheap, dear, run.costs.options)
    assert not costs_no_more((*cheap[:-1], 0), dear, run.costs.options)  # dense in the last unit


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """The linear layers in the order in which they are compressed, each with the numbers of bits or zeros."""
    compress, seen = losses.compress_every_way, list[tuple[str, set[str]]]()

    def spy(linear: LinearChoices, *arguments: Any) -> dict[int, MaskedWeight]:
        named = {linear.choices[level].quant if level < 4 else "50%" for level in linear.wanted}
        seen.append((linear.name, named))
        return compress(linear, *arguments)

    monkeypatch.setattr(losses, "compress_every_way", spy)
    return seen


def test_a_choice_that_another_one_undercuts_is_compressed_in_two_layers_only(
    compressed: list[tuple[str, set[str]]], monkeypatch: pytest.MonkeyPatch
):
    search()
    with_zeros = [name for name, ways in compressed if "50%" in ways]
    assert with_zeros == ["model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"]  # the smallest
    assert dict(compressed[:3])[with_zeros[0]] == {"none", "w8", "w4", "w2", "50%"}
    compressed.clear()
    monkeypatch.setattr(losses, "UNDERCUT", 1e6)
    search()
    assert len([name for name, ways in compressed if "50%" in ways]) == 2 + 14


def test_the_second_bank_has_what_was_proposed(compressed: list[tuple[str, set[str]]]):
    result = search()
    for name, choice in result.choices.items():
        first, second, *_ = [ways for other, ways in compressed[2:] if other == name]  # after the two smallest layers
        assert choice.quant in second < first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_scores_as_a_cpu_does():
    result = search(device="cuda")
    assert result.predicted["bits"] <= LIMITS["bits"] * (1 + 1e-9)
    dense, compressed = sharp_model(), sharp_model()
    for name, masked in result.weights.items():
        weight = weight_of(compressed.get_submodule(name))
        weight.data.copy_(to_dense(masked, weight))
        on_gpu = to_dense(masked, weight.data.cuda())
        assert torch.equal(on_gpu.cpu(), weight.data)
    assert mean_kl(dense, compressed, SCORED) == pytest.approx(result.kl, rel=1e-3)


@pytest.mark.parametrize("taken", [True, False])
def test_one_choice_for_all_layers_is_taken_if_it_loses_less(taken: bool, monkeypatch: pytest.MonkeyPatch):
    """The search ends in a bad assignment: the last layer has two bits and all others have four, within 5 bits."""
    bad = (*[2] * 7, 3)
    monkeypatch.setattr(JointSearch, "_refine", lambda self, best, number: (bad, [{0, 1, 2, 3, 4}] * 8))
    monkeypatch.setattr(joint, "HOPELESS", 2.0 if taken else 0.0)
    result = search({"bits": 5.0 / 16})
    quants = [choice.quant for choice in result.choices.values()]
    assert result.uniform is not None
    assert result.uniform[0] == "any w4 g8@0%"
    assert set(quants) == ({"w4"} if taken else {"w4", "w2"})
    dense, compressed = sharp_model(), sharp_model()
    for name, masked in result.weights.items():
        weight = weight_of(compressed.get_submodule(name))
        weight.data.copy_(to_dense(masked, weight))
    assert mean_kl(dense, compressed, SCORED) == pytest.approx(result.kl, rel=1e-4)


def test_results_are_compared_on_sequences_that_the_search_has_not_seen(monkeypatch: pytest.MonkeyPatch):
    bad = (*[2] * 7, 3)  # as above: both results are scored
    monkeypatch.setattr(JointSearch, "_refine", lambda self, best, number: (bad, [{0, 1, 2, 3, 4}] * 8))
    seen: list[set[tuple[int, ...]]] = []
    scorer = Scorer.__init__

    def record(self: Scorer, model, space, bank, batches, *more: Any) -> None:
        seen.append({tuple(row[row >= 0].tolist()) for batch in batches for row in batch})
        scorer(self, model, space, bank, batches, *more)

    monkeypatch.setattr(Scorer, "__init__", record)
    search({"bits": 5.0 / 16})
    first, second, of_search, of_single, last = seen  # two banks, two results, and the one that is taken
    assert first == second == last == {tuple(row.tolist()) for batch in SCORED for row in batch}
    assert of_search == of_single
    assert not of_search & first
    assert len(of_search | first) == 8  # all sequences of the text, which is short


def test_a_single_sequence_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "build_bank", lambda *_, **__: pytest.fail("a bank was built"))
    with pytest.raises(InputError, match="at least 2 calibration sequences"):
        search_choices(sharp_model(), [calibration()[1][:1]], RECIPE, options, LIMITS, seed=0)


def test_what_no_choice_reaches_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "build_bank", lambda *_, **__: pytest.fail("a bank was built"))
    with pytest.raises(Unreachable, match="bits") as caught:
        search({"bits": 2.9 / 16})
    assert caught.value.least == pytest.approx({"bits": 3 / 16})


@pytest.mark.parametrize("pieces", mostly_slow([1, 3, 5, 8], 3))
def test_an_interrupted_search_goes_on_to_the_same_result(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    identity = {"run": "one"}
    save, saved = Journal.save, []

    def interrupted(self: Journal, part: str, index: int, tensors, notes) -> None:
        save(self, part, index, tensors, notes)
        saved.append(part)
        if len(saved) == pieces:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "save", interrupted)
        with pytest.raises(Interrupted):
            search(journal=Journal(tmp_path, identity))
    result, expected = search(journal=Journal(tmp_path, identity)), searched()
    assert (result.choices, result.kl, result.metrics()) == (expected.choices, expected.kl, expected.metrics())
    for name, masked in result.weights.items():
        assert torch.equal(masked.values, expected.weights[name].values)


def test_what_may_be_better_once_tuned_is_kept_for_comparison(monkeypatch: pytest.MonkeyPatch):
    """Every unit's best option has zeros, by the measured losses; so has the best single choice."""
    recipe = replace(RECIPE, tune="bqpo")
    menu = {**MENU, ("50%", "w2"): 2.5}

    def with_sparse(shapes: Sequence[tuple[int, int]]) -> list[Option]:
        weights = sum(n * k for n, k in shapes)
        return [Option(Choice(*key, "any"), {"bits": bits * weights}) for key, bits in menu.items()]

    measure = ChoiceLosses.measure

    def measured(self: ChoiceLosses, centre: tuple[int, ...]) -> None:
        measure(self, centre)
        self.losses = [[0.9, 0.5, 0.3, 0.2, 0.8, 0.1] for _ in self.units]
        self.uniform_kl = {choice: 0.0 if choice.pattern == "50%" else 1e-6 for choice in self.costs.uniforms()}

    monkeypatch.setattr(losses, "DOMINATED", 1e9)
    monkeypatch.setattr(losses, "UNDERCUT", 1e9)
    monkeypatch.setattr(joint, "HOPELESS", 1e9)
    monkeypatch.setattr(JointSearch, "_disturbed", lambda self, rng: self._losses.losses)
    monkeypatch.setattr(ChoiceLosses, "measure", measured)
    result = search_choices(sharp_model(), calibration(), recipe, with_sparse, {"bits": 4.0 / 16}, seed=0)
    assert {choice.pattern for choice in result.choices.values()} == {"50%"}
    (plain,) = result.finalists
    assert plain.label == "without zeros"
    assert {choice.pattern for choice in plain.choices.values()} == {"g8@0%"}
    assert plain.predicted["bits"] <= 4.0 / 16
