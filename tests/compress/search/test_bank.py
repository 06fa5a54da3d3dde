"""The bank holds what the pruners return for each level, and nothing else."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from semisparse.compress import Journal, Recipe, compress_decoder_layers
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.prune import order
from semisparse.compress.search import bank as bank_module
from semisparse.compress.search.bank import Bank, build_bank, prune_densities
from semisparse.compress.search.masked import to_dense, to_masked
from semisparse.compress.search.space import search_space
from semisparse.nn import weight_of
from semisparse.quant.group import scales_of
from tests.compress.search.small import REPORT, SPARSEGPT, calibration, recipe
from tests.models import random_model

CPU = torch.device("cpu")


def bank_of(
    model: PreTrainedModel,
    plan: Recipe,
    journal: Journal | None = None,
    centre_weights=None,
    number: int = 0,
    accepts=lambda _: True,
) -> Bank:
    layers = list_decoder_layers(model, plan, {})
    space = search_space(layers, 1, accepts)
    centre = (0,) * len(space)
    quiet = {"number": number, "device": CPU, "progress": lambda *_: None, "journal": journal}
    quiet |= {"prune": prune_densities, "ranks": Ranks(), "offload": None}
    return build_bank(model, layers, space, centre, centre_weights or {}, calibration(), plan, **quiet)


def equal(left: Bank, right: Bank) -> bool:
    """Whether two banks are equal, apart from the time that pruning took."""
    return left.keys() == right.keys() and all(
        replace(one.report, seconds=0) == replace(other.report, seconds=0)
        and torch.equal(one.mask, other.mask)
        and torch.equal(one.values, other.values)
        for name in left
        for one, other in ((left[name][level], right[name][level]) for level in left[name])
    )


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_masked_weight_is_expanded_again(n: int, k: int, density: float, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(n * 41 + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    weight *= torch.rand(n, k, generator=generator) < density
    masked = to_masked(weight, REPORT)
    assert torch.equal(to_dense(masked, weight), weight)
    assert masked.mask.nbytes == -(-n * k // 8)
    assert masked.values.numel() == weight.count_nonzero()
    transposed = weight.T.contiguous().T  # strides as of a Conv1D's weight
    assert torch.equal(to_dense(to_masked(transposed, REPORT), transposed), weight)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(2, 0.5), (3, 0.5), (4, 0.5), (8, 1)])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_quantised_weight_is_stored_as_codes(
    bits: int, bytes_per_weight: float, dtype: torch.dtype, symmetric: bool, dropped: bool
):
    weight = torch.randn(6, 36, generator=torch.Generator().manual_seed(bits))
    weight[1, 8:24] = 0
    weight[2, 3] = 0
    if dropped:
        weight[0, 16:32] = 0
    scales = scales_of(weight, bits, 16, dtype, symmetric)
    weight = scales.rounded(weight)
    masked = to_masked(weight, replace(REPORT, scales=scales))
    for like in (weight, weight.float()):
        assert torch.equal(to_dense(masked, like), weight.to(like.dtype))
        assert not to_dense(masked, like)[weight == 0].signbit().any()
    assert masked.values.nbytes == 6 * 48 * bytes_per_weight  # the last group is padded
    assert masked.mask.nbytes in (0, 27)
    assert not symmetric or not masked.mask.nbytes


def test_a_weight_that_is_none_of_the_codes_is_stored_as_it_is():
    weight = torch.randn(6, 32).bfloat16()
    masked = to_masked(weight, replace(REPORT, scales=scales_of(weight, 3, 16, torch.bfloat16)))
    assert torch.equal(to_dense(masked, weight), weight)


FIRST = {"llama": "model.layers.0.self_attn.q_proj", "gpt2": "transformer.h.0.attn.c_attn"}
LAST = {"llama": "model.layers.1.mlp.down_proj", "gpt2": "transformer.h.1.mlp.c_proj"}


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [("llama", "32:64"), ("llama", "16:32v4"), ("llama", "g4@50%"), ("llama", "70%"), ("gpt2", "70%"), ("gpt2", "4:8")],
)
def test_every_level_is_what_pruning_to_it_alone_gives(
    architecture: str, pattern: str, monkeypatch: pytest.MonkeyPatch
):
    """Check the first linear layer, whose inputs are the dense model's; the pruning order of the columns is fixed."""
    monkeypatch.setattr(order, "MIN_REORDERED_WINDOW", sys.maxsize)
    model = random_model(architecture)
    before = [parameter.clone() for parameter in model.parameters()]
    first, last = FIRST[architecture], LAST[architecture]
    others = [name for name, _ in model.named_modules() if name not in (first, last)]
    plan = recipe(pattern=pattern, **SPARSEGPT, ignore=tuple(others))
    bank = bank_of(model, plan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    space = {layer.name: layer for layer in search_space(list_decoder_layers(model, plan, {}), 1, lambda _: True)}
    assert bank.keys() == space.keys() == {first, last}
    for name, layer in space.items():
        assert bank[name].keys() == layer.patterns.keys()
        for level, each in layer.patterns.items():
            each.check(to_dense(bank[name][level], weight_of(model.get_submodule(name))))
    for level in {-2, 0, 1} & space[first].patterns.keys():
        alone = random_model(architecture)
        compress_decoder_layers(alone, calibration(), plan, patterns={first: space[first].patterns[level]})
        weight = weight_of(alone.get_submodule(first))
        assert torch.equal(to_dense(bank[first][level], weight), weight)


def test_the_uniform_level_is_what_compressing_gives():
    """Check every linear layer: levels are pruned on the outputs of uniformly pruned layers, in the uniform order."""
    plan = recipe(pattern="4:8", prune="sparsegpt")
    bank = bank_of(random_model("llama"), plan)
    model = random_model("llama")
    for report in compress_decoder_layers(model, calibration(), plan):
        weight = weight_of(model.get_submodule(report.name))
        assert torch.equal(to_dense(bank[report.name][0], weight), weight)


def test_finished_decoder_layers_are_not_pruned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = bank_of(random_model("llama"), recipe(), Journal(tmp_path, {}))
    assert equal(bank_of(random_model("llama"), recipe()), whole)
    (tmp_path / "bank-0001.json").unlink()
    pruned = []
    real = bank_module.prune_levels

    def counted(*arguments):
        pruned.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(bank_module, "prune_levels", counted)
    assert equal(bank_of(random_model("llama"), recipe(), Journal(tmp_path, {})), whole)
    assert len(pruned) == 7


def test_a_second_bank_keeps_the_centre_and_prunes_the_rest_for_its_outputs(tmp_path: Path):
    plan = recipe(pattern="4:8")
    first = bank_of(random_model("llama"), plan, Journal(tmp_path, {}))
    centre = {name: levels[min(levels)]._replace(report=levels[0].report) for name, levels in first.items()}
    second = bank_of(random_model("llama"), plan, Journal(tmp_path, {}), centre, number=1)  # not the first one's layers
    kept = {name: {0: second[name][0]} for name in centre}
    assert equal(kept, {name: {0: masked} for name, masked in centre.items()})
    last = LAST["llama"]
    assert not torch.equal(first[last][1].values, second[last][1].values)


def test_without_other_levels_the_bank_is_the_centre():
    plan = recipe(pattern="4:8")
    centre = {name: levels[0] for name, levels in bank_of(random_model("llama"), plan).items()}
    alone = bank_of(random_model("llama"), plan, None, centre, number=1, accepts=lambda pattern: str(pattern) == "4:8")
    assert alone == {name: {0: masked} for name, masked in centre.items()}
