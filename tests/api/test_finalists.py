"""Two compressed models are compared after tuning, and the one that loses less is put into the model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import semisparse
from semisparse.api import chosen, compression
from semisparse.api.finalists import take_best
from semisparse.api.packed_layers import PackedLayers
from semisparse.compress import Choice, Recipe, compress_decoder_layers
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search.joint import Finalist, JointResult
from semisparse.compress.search.passing import PassingScorer
from semisparse.compress.search.score import scoring_batches, split_sequences
from semisparse.nn import SparseLinear, weight_of
from semisparse.nn.dequantise import dequantise_layers
from tests.compress.checking import Interrupted
from tests.compress.search.small import calibration, mean_kl, sharp_model
from tests.models import byte_tokenizer, random_model

TWO, FOUR = (Choice("g8@0%", kind, "gqs") for kind in ("w2", "w4"))
DENSE = Choice("0%", "none", "dense")
RECIPE = Recipe(pattern="0%", prune="magnitude", tune="bqpo", tune_epochs=1)


def names_of(model: torch.nn.Module) -> list[str]:
    return [layer.full_name(name) for layer in list_decoder_layers(model, RECIPE, {}) for name in layer.patterns]


@pytest.mark.parametrize("order", [(TWO, FOUR), (FOUR, TWO)])
def test_the_one_that_loses_less_is_put_into_the_model(order: tuple[Choice, Choice]):
    model, dense, batches = sharp_model(), sharp_model(), calibration()
    finalists = {choice.quant: dict.fromkeys(names_of(model), choice) for choice in order}
    seen: list[bool] = []

    def compress(tuning: list[dict[str, object]], **options: object) -> None:
        seen.append(any(isinstance(module, SparseLinear) for module in model.modules()))
        compress_decoder_layers(model, batches, RECIPE, **options)
        tuning.append({})

    packed_layers = partial(PackedLayers, model, RECIPE, kept={}, journal=None, mapped=False)
    scorer = PassingScorer(model, scoring_batches(batches, 10**6, seed=0), torch.device("cpu"), Ranks())
    best, kl, tuning = take_best(finalists, compress, packed_layers, scorer)
    assert seen == [False, False]
    assert kl["w4"] < kl["w2"]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    assert {layer.packed.params["kind"] for layer in layers.values()} == {"w4"}
    assert layers.keys() == best.entries.keys() == set(names_of(dense))
    assert {label: len(reports) for label, reports in tuning.items()} == {"w2": 1, "w4": 1}
    dequantise_layers(model, torch.float32)
    assert mean_kl(dense, model, batches) == pytest.approx(kl["w4"], rel=0.05)  # stored scales are bfloat16


def test_choices_are_compressed_as_recipes_of_their_own():
    """Of four-bit layers one is dense and one has two bits: up to there the others are those of the four-bit recipe."""
    mixed, four = sharp_model(), sharp_model()
    recipe = Recipe(pattern="0%", prune="sparsegpt", tune="none")
    names = names_of(mixed)
    choices = {**dict.fromkeys(names, FOUR), names[-1]: TWO, names[-2]: DENSE}
    reports = compress_decoder_layers(mixed, calibration(), recipe, choices=choices)
    compress_decoder_layers(four, calibration(), FOUR.recipe(recipe))
    for name in names[:-2]:
        assert torch.equal(weight_of(mixed.get_submodule(name)), weight_of(four.get_submodule(name))), name
    dense = weight_of(sharp_model().get_submodule(names[-2]))
    assert torch.equal(weight_of(mixed.get_submodule(names[-2])), dense)
    assert {report.scales.bits for report in reports if report.scales} == {2, 4}
    assert reports[names.index(names[-2])].outcome == "dense"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the joint search: two bits in all layers, and four to compare them with."""

    def search(model: torch.nn.Module, *_: object, **__: object) -> JointResult:
        two, four = (dict.fromkeys(names_of(model), choice) for choice in (TWO, FOUR))
        others = (Finalist("four bits", four, {"bits": 0.4}),)
        return JointResult(two, {}, 1.0, ("gqs w4 g8@0%", 1.1), others, {"bits": 0.25}, 1, 1)

    monkeypatch.setattr(compression, "_search_choices", search)


def compress(out: Path, stop_at: tuple[int, str] | None = None) -> semisparse.CompressionReport:
    """Compress a model; interrupt the run where a stage begins for the given time."""
    count = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += stop_at is not None and stage == stop_at[1] and done == 7
        if stop_at is not None and count == stop_at[0]:
            raise Interrupted

    documents = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]
    kwargs = {"samples": 8, "seqlen": 32, "device": "cpu", "settings": ("tune_epochs=1",)}
    source = out.parent / "source"
    if not source.exists():
        random_model("llama").save_pretrained(source)
        byte_tokenizer().save_pretrained(source)
    return semisparse.compress(
        source, None, "auto", documents, out, target={"bits": 9.0}, resume=True, progress=progress, **kwargs
    )


@pytest.mark.usefixtures("found")
def test_finalists_are_compared_on_sequences_that_the_search_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[list[torch.Tensor]] = []
    search = compression._search_choices

    def record(model: torch.nn.Module, batches: list[torch.Tensor], *more: Any, **options: Any) -> JointResult:
        calls.append(batches)
        return search(model, batches, *more, **options)

    class Recording(PassingScorer):
        def __init__(self, model: torch.nn.Module, batches: list[torch.Tensor], *more: Any) -> None:
            calls.append(batches)
            super().__init__(model, batches, *more)

    monkeypatch.setattr(compression, "_search_choices", record)
    monkeypatch.setattr(chosen, "PassingScorer", Recording)
    compress(tmp_path / "out")
    drawn, scored = calls
    every = sequences(drawn)
    searched = {tuple(row.tolist()) for row in split_sequences(drawn, 2048, seed=0)[0]}
    assert not sequences(scored) & searched
    assert sequences(scored) | searched == every


def sequences(batches: list[torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(row[row >= 0].tolist()) for batch in batches for row in batch}


@pytest.mark.usefixtures("found")
def test_an_interrupted_comparison_goes_on_to_the_same_bytes(tmp_path: Path):
    report = compress(tmp_path / "whole")
    assert report.search is not None
    assert report.search["tuned"]["four bits"] < report.search["tuned"]["search"]
    assert report.search["taken"] == "four bits"
    assert report.search["predicted"] == {"bits": 0.4}
    assert {layer["bits_per_weight"] > 6 for layer in report.layers} == {True}
    stages = [stage["stage"] for stage in report.tuning]
    assert len(stages) == len(set(stages)) == 2  # of one of the two models, by decoder layer
    with pytest.raises(Interrupted):
        compress(tmp_path / "out", (2, "decoder layer 2 of 2"))  # the second time it is that of the second finalist
    work = {path.name for path in (tmp_path / "out.partial").glob("block*.json")}
    assert work == {"block-0000.json", "block-0001.json", "block1-0000.json"}
    resumed = compress(tmp_path / "out")
    assert resumed.search == report.search
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
