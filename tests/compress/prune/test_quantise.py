"""Pruning with quantisation: the weights are on the codes, and lose less than by rounding to nearest."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semisparse.compress import InPlace, Journal, LayerReport, Recipe, compress_decoder_layers, fingerprint
from semisparse.compress.prune import Statistics, prune_layer
from semisparse.formats import get_format
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern
from semisparse.quant.group import KINDS, scales_of
from tests.compress.checking import is_quantised
from tests.models import VOCABULARY, random_model


def problem(n: int, k: int) -> tuple[torch.Tensor, Statistics]:
    """A weight, and inputs that are correlated, of unequal scale, and one of them always zero."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(k, k, generator=generator) @ torch.diag(torch.linspace(0.1, 2, k))
    x = torch.randn(4 * k, k, generator=generator) @ mixed
    x[:, 5] = 0
    return torch.randn(n, k, generator=generator), Statistics(x.T @ x / len(x))


def loss(weight: torch.Tensor, dense: torch.Tensor, statistics: Statistics) -> float:
    change = weight - dense
    return float((change @ statistics.hessian * change).sum())


@pytest.mark.parametrize(
    ("pattern", "kind", "refine"),
    [
        ("g16@50%", "w4", "cg"),
        ("g16@50%", "w8", "none"),
        ("g16@0%", "w3", "cg"),
        ("g16@0%", "w4", "none"),
        ("g4@40%/row", "w8", "cg"),
        ("g4@40%/row", "w2", "none"),
        ("g32@30%", "w2", "cg"),
        ("g32@30%", "w3", "none"),
    ],
)
def test_the_weight_is_quantised_and_obeys_the_pattern(pattern: str, kind: str, refine: str):
    dense, statistics = problem(12, 70)
    recipe = Recipe(pattern=pattern, quant=kind, refine=refine)
    pruned = prune_layer(dense.half(), parse_pattern(pattern), statistics, recipe)
    assert pruned.scales.scale.dtype == torch.float16
    assert is_quantised(pruned.weight.half(), pruned.scales)
    assert torch.equal(pruned.weight.half().float(), pruned.weight)
    parse_pattern(pattern).check(pruned.weight)
    size = parse_pattern(pattern).step
    nearest = scales_of(dense, KINDS[kind], size, torch.float16)
    kept = (pruned.weight != 0).float()
    plain = nearest.rounded(dense * kept).float()
    assert loss(pruned.weight, dense, statistics) < 0.9 * loss(plain, dense, statistics)


@pytest.mark.parametrize("prune", ["magnitude", "wanda"])
def test_other_pruners_round_to_nearest(prune: str):
    dense, statistics = problem(6, 32)
    pattern = parse_pattern("g8@50%")
    plain = prune_layer(dense, pattern, statistics, Recipe(pattern="g8@50%", prune=prune)).weight
    pruned = prune_layer(dense, pattern, statistics, Recipe(pattern="g8@50%", prune=prune, quant="w4"))
    assert torch.equal(pruned.weight, scales_of(plain, 4, 8, torch.float32).rounded(plain))


@pytest.mark.parametrize(
    ("pattern", "kind", "settings"),
    [
        ("32:64", "w4", {}),
        ("32:64", "w4", {"refine": "none"}),
        ("2:4", "w4", {}),
        ("50%", "w4", {"refine": "none"}),
        ("70%/row", "w4", {}),
        ("6:10", "w4", {}),
        ("4:8", "w8", {"order": "columns"}),
    ],
)
def test_weights_pruned_singly_are_quantised_in_blocks_of_64_and_stay_pruned(pattern: str, kind: str, settings: dict):
    """K = 150: two blocks, then a short one."""
    dense, statistics = problem(12, 150)
    parsed = parse_pattern(pattern)
    pruned = prune_layer(dense.half(), parsed, statistics, Recipe(pattern=pattern, quant=kind, **settings))
    scales = pruned.scales
    assert (scales.symmetric, scales.size, tuple(scales.scale.shape)) == (True, 64, (12, 3))
    parsed.check(pruned.weight)
    packed = get_format("bitmask").pack(pruned.weight.half(), pattern, kind=kind, scales=scales)
    assert torch.equal(packed.unpack().float(), pruned.weight)
    unrounded = prune_layer(dense.half(), parsed, statistics, Recipe(pattern=pattern, **settings)).weight
    nearest = scales_of(unrounded, KINDS[kind], 64, torch.float16, symmetric=True).rounded(unrounded).float()
    added = [loss(each, dense, statistics) - loss(unrounded, dense, statistics) for each in (pruned.weight, nearest)]
    assert added[0] < 0.8 * added[1]


def calibration() -> list[torch.Tensor]:
    return [torch.randint(0, VOCABULARY, (40, 20), generator=torch.Generator().manual_seed(0))]


def test_tuning_moves_symmetric_scales_and_leaves_zeros():
    recipe = Recipe(pattern="2:4", quant="w4", prune="wanda", tune="bqpo", tune_epochs=8)
    untuned, tuned = (
        compress_decoder_layers(model := random_model("llama"), calibration(), each)
        for each in (replace(recipe, tune="none"), recipe)
    )
    for report in tuned:
        weight = weight_of(model.get_submodule(report.name))
        parse_pattern("2:4").check(weight)
        assert is_quantised(weight, report.scales), report.name
        assert (report.scales.zero == 128).all()
    assert not all(torch.equal(t.scales.scale, u.scales.scale) for t, u in zip(tuned, untuned, strict=True))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_tuning_moves_the_scales_and_leaves_the_weights_quantised(architecture: str):
    """gpt2 stores its weights transposed; their groups are along K nevertheless."""
    recipe = Recipe(pattern="g4@50%", quant="w4", prune="wanda", tune="bqpo", tune_epochs=8, tune_rate=0.3)
    untuned, tuned = (
        compress_decoder_layers(model := random_model(architecture), calibration(), each)
        for each in (replace(recipe, tune="none"), recipe)
    )
    for report in tuned:
        assert is_quantised(weight_of(model.get_submodule(report.name)), report.scales), report.name
    for part in ("scale", "zero"):
        pairs = [(getattr(t.scales, part), getattr(u.scales, part)) for t, u in zip(tuned, untuned, strict=True)]
        assert not all(torch.equal(*pair) for pair in pairs), part


def test_a_resumed_run_has_the_same_scales(tmp_path: Path):
    recipe = Recipe(pattern="g8@50%", quant="w3", prune="magnitude")
    runs: list[list[LayerReport]] = []
    for _ in range(2):
        model = random_model("llama")
        journal = Journal(tmp_path, fingerprint(calibration(), recipe, seed=0, device="cpu"))
        runs.append(compress_decoder_layers(model, calibration(), recipe, store=InPlace(journal)))
    assert runs[0] == runs[1]
    for first, second in zip(*runs, strict=True):
        assert (first.scales.bits, first.scales.size) == (second.scales.bits, second.scales.size) == (3, 8)
        assert torch.equal(first.scales.scale, second.scales.scale)
        assert torch.equal(first.scales.zero, second.scales.zero)


def test_a_resumed_run_knows_symmetric_scales(tmp_path: Path):
    recipe = Recipe(pattern="2:4", quant="w8", prune="magnitude")
    for _ in range(2):
        model = random_model("llama")
        journal = Journal(tmp_path, fingerprint(calibration(), recipe, seed=0, device="cpu"))
        reports = compress_decoder_layers(model, calibration(), recipe, store=InPlace(journal))
        assert all(report.scales.symmetric for report in reports)
