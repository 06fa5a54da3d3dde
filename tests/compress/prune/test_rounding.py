"""Pruning and rounding together: the result lies on the codes, and loses less than rounding to nearest."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semisparse.compress import Journal, LayerReport, Recipe, compress_blocks, fingerprint
from semisparse.compress.prune import Statistics, prune_layer
from semisparse.errors import RecipeError
from semisparse.formats import registry
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from semisparse.quant.group import KINDS, scales_of
from tests.models import VOCABULARY, random_model


def problem(n: int, k: int) -> tuple[torch.Tensor, Statistics]:
    """A weight, and inputs that are correlated, of uneven size, and one of them dead."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(k, k, generator=generator) @ torch.diag(torch.linspace(0.1, 2, k))
    x = torch.randn(4 * k, k, generator=generator) @ mixed
    x[:, 5] = 0
    return torch.randn(n, k, generator=generator), Statistics(x.T @ x / len(x))


def loss(weight: torch.Tensor, dense: torch.Tensor, statistics: Statistics) -> float:
    change = weight - dense
    return float((change @ statistics.hessian * change).sum())


@pytest.mark.parametrize("refine", ["cg", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["g16@50%", "g16@0%", "g4@40%/row", "g32@30%"])
def test_the_weight_lies_on_its_codes_and_the_pattern(pattern: str, kind: str, refine: str):
    dense, statistics = problem(12, 70)
    recipe = Recipe(pattern=pattern, quant=kind, refine=refine)
    found = prune_layer(dense.half(), parse_pattern(pattern), statistics, recipe)
    assert found.scales.scale.dtype == torch.float16
    assert torch.equal(found.scales.rounded(found.weight).float(), found.weight)
    parse_pattern(pattern).check(found.weight)
    size = parse_pattern(pattern).step
    nearest = scales_of(dense, KINDS[kind], size, torch.float16)
    kept = (found.weight != 0).float()
    plain = nearest.rounded(dense * kept).float()
    assert loss(found.weight, dense, statistics) < 0.9 * loss(plain, dense, statistics)


@pytest.mark.parametrize("prune", ["magnitude", "wanda"])
def test_other_pruners_round_to_nearest(prune: str):
    dense, statistics = problem(6, 32)
    pattern = parse_pattern("g8@50%")
    plain = prune_layer(dense, pattern, statistics, Recipe(pattern="g8@50%", prune=prune)).weight
    found = prune_layer(dense, pattern, statistics, Recipe(pattern="g8@50%", prune=prune, quant="w4"))
    assert torch.equal(found.weight, scales_of(plain, 4, 8, torch.float32).rounded(plain))


def test_rounding_needs_groups():
    with pytest.raises(RecipeError, match="quant=w4 rounds the groups of a pattern such as g16@50%, not 2:4"):
        Recipe(pattern="2:4", quant="w4")


def calibration() -> list[torch.Tensor]:
    return [torch.randint(0, VOCABULARY, (40, 20), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("tune", ["none", "bqpo"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_what_is_packed_is_what_was_compressed(architecture: str, tune: str):
    """gpt2 stores its weights turned; their groups still lie along K."""
    model = random_model(architecture)
    before = copy.deepcopy(model)
    recipe = Recipe(pattern="g4@50%", quant="w4", tune=tune, tune_epochs=8)
    untuned = compress_blocks(before, calibration(), replace(recipe, tune="none"))
    reports = compress_blocks(model, calibration(), recipe)
    for report in reports:
        weight = weight_of(model.get_submodule(report.name)).contiguous()
        packed = registry()["gqs"].pack(weight, report.pattern, kind="w4", scales=report.scales)
        assert torch.equal(packed.unpack() + 0.0, weight + 0.0)
    for part in ("scale", "zero"):
        pairs = [(getattr(r.scales, part), getattr(u.scales, part)) for r, u in zip(reports, untuned, strict=True)]
        assert all(torch.equal(*pair) for pair in pairs) is (tune == "none"), part


def test_a_resumed_run_gives_the_scales_too(tmp_path: Path):
    recipe = Recipe(pattern="g8@50%", quant="w3", prune="magnitude")
    runs: list[list[LayerReport]] = []
    for _ in range(2):
        model = random_model("llama")
        journal = Journal(tmp_path, fingerprint(model, calibration(), recipe, seed=0, device="cpu"))
        runs.append(compress_blocks(model, calibration(), recipe, journal=journal))
    assert runs[0] == runs[1]
    for first, second in zip(*runs, strict=True):
        assert (first.scales.bits, first.scales.size) == (second.scales.bits, second.scales.size) == (3, 8)
        assert torch.equal(first.scales.scale, second.scales.scale)
        assert torch.equal(first.scales.zero, second.scales.zero)
