"""The bank holds what the pruners give for each level, and nothing else of it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.compress import Journal, compress_blocks
from semisparse.compress.prune import sparsegpt
from semisparse.compress.search.bank import Bank, build_bank, expand, store
from semisparse.compress.search.space import list_choices
from semisparse.compress.walk import list_blocks
from semisparse.nn import weight_of
from tests.compress.search.small import GAINS, REPORT, calibration, recipe
from tests.models import random_model

CPU = torch.device("cpu")


def bank_of(model, plan, journal: Journal | None = None, held=None, number: int = 0, accepts=lambda _: True) -> Bank:
    blocks = list_blocks(model, plan, {})
    choices = list_choices(blocks, 1, accepts)
    centre = (0,) * len(choices)
    quiet = {"number": number, "device": CPU, "progress": lambda *_: None, "journal": journal}
    return build_bank(model, blocks, choices, centre, held or {}, calibration(), plan, **quiet)


def same(left: Bank, right: Bank) -> bool:
    """Whether two banks hold the same, however long pruning took."""
    return left.keys() == right.keys() and all(
        replace(one.report, seconds=0) == replace(other.report, seconds=0)
        and torch.equal(one.mask, other.mask)
        and torch.equal(one.values, other.values)
        for name in left
        for one, other in ((left[name][level], right[name][level]) for level in left[name])
    )


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_stored_weight_comes_back(n: int, k: int, density: float, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(n * 41 + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    weight *= torch.rand(n, k, generator=generator) < density
    stored = store(weight, REPORT)
    assert torch.equal(expand(stored, weight), weight)
    assert stored.mask.nbytes == -(-n * k // 8)
    assert stored.values.numel() == weight.count_nonzero()
    transposed = weight.T.contiguous().T  # as the weight of a Conv1D lies in memory
    assert torch.equal(expand(store(transposed, REPORT), transposed), weight)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("pattern", ["32:64", "16:32v4", "g4@50%", "70%"])
def test_every_level_is_what_pruning_to_it_alone_gives(architecture: str, pattern: str, monkeypatch):
    """In the first block, whose inputs are the dense model's, and with an order of the columns that is no level's."""
    monkeypatch.setattr(sparsegpt, "WIDE", sys.maxsize)
    model = random_model(architecture)
    before = [parameter.clone() for parameter in model.parameters()]
    plan = recipe(pattern=pattern)
    bank = bank_of(model, plan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    choices = list_choices(list_blocks(model, plan, {}), 1, lambda _: True)
    first_stage = [choice for choice in choices if choice.block == 0][:1]
    for choice in choices:
        for level, found in choice.patterns.items():
            weight = weight_of(model.get_submodule(choice.name))
            found.check(expand(bank[choice.name][level], weight))
    for choice in first_stage:
        for level in (-2, 0, 1):
            if level not in choice.patterns:
                continue
            alone = random_model(architecture)
            compress_blocks(alone, calibration(), plan, patterns={choice.name: choice.patterns[level]})
            weight = weight_of(alone.get_submodule(choice.name))
            assert torch.equal(expand(bank[choice.name][level], weight), weight)


def test_the_uniform_level_is_what_the_ordinary_pass_gives():
    """In every layer: the levels are pruned on the outputs of uniformly pruned layers, their windows in its order."""
    plan = recipe(pattern="4:8", **GAINS)
    bank = bank_of(random_model("llama"), plan)
    model = random_model("llama")
    for report in compress_blocks(model, calibration(), plan):
        weight = weight_of(model.get_submodule(report.name))
        assert torch.equal(expand(bank[report.name][0], weight), weight)


def test_finished_blocks_are_not_pruned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from semisparse.compress.search import bank as module

    whole = bank_of(random_model("llama"), recipe(), Journal(tmp_path, {}))
    assert same(bank_of(random_model("llama"), recipe()), whole)
    (tmp_path / "bank-0001.json").unlink()
    pruned = []
    real = module.prune_levels

    def counted(*arguments):
        pruned.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, "prune_levels", counted)
    assert same(bank_of(random_model("llama"), recipe(), Journal(tmp_path, {})), whole)
    assert len(pruned) == 7


def test_a_bank_around_held_weights_keeps_them_and_prunes_the_rest_for_their_outputs(tmp_path: Path):
    plan = recipe(pattern="4:8")
    first = bank_of(random_model("llama"), plan, Journal(tmp_path, {}))
    held = {name: levels[min(levels)]._replace(report=levels[0].report) for name, levels in first.items()}
    second = bank_of(random_model("llama"), plan, Journal(tmp_path, {}), held, number=1)  # not the first's blocks
    assert all(second[name][0] is held[name] for name in held)
    last = next(name for name in first if name.startswith("model.layers.1."))
    assert not torch.equal(first[last][1].values, second[last][1].values)


def test_where_nothing_is_near_a_held_weight_it_is_all_there_is():
    plan = recipe(pattern="4:8")
    first = bank_of(random_model("llama"), plan)
    held = {name: levels[0] for name, levels in first.items()}
    alone = bank_of(random_model("llama"), plan, held=held, number=1, accepts=lambda pattern: str(pattern) == "4:8")
    assert alone == {name: {0: stored} for name, stored in held.items()}
