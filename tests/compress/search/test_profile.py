"""`search=profile` finds what each role and depth needs, keeps the budget and survives interruptions."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from semisparse.compress import Journal, compress_decoder_layers, search
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import SearchResult, anew, search_patterns
from semisparse.compress.search.profile import (
    DEPTH,
    MAX_STEPS,
    REACH,
    factors_of,
    fitted,
    hadamard,
    search_profile,
)
from semisparse.compress.search.space import LinearSpace, kept_weights, search_space
from tests.compress.checking import Interrupted
from tests.compress.search.small import calibration, mean_kl, recipe, regular_model


def space_of(pattern: str) -> list[LinearSpace]:
    layers = list_decoder_layers(regular_model(), recipe("profile", pattern), {})
    return search_space(layers, REACH, lambda pattern: True)


def uniform_of(space: list[LinearSpace]) -> tuple[int, ...]:
    return (0,) * len(space)


def test_columns_of_a_hadamard_matrix_are_orthogonal():
    for least, rows in ((1, 1), (2, 2), (3, 4), (8, 8), (9, 16)):
        matrix = torch.tensor(hadamard(least))
        assert torch.equal(matrix.T @ matrix, rows * torch.eye(rows, dtype=torch.long))
        assert (matrix[:, 0] == 1).all()


def test_factors_are_all_roles_but_the_largest_and_depth():
    shares = factors_of(space_of("32:64"))
    mlp, square, narrow = 64 * 128, 64 * 64, 64 * 32
    total = 3 * mlp + 2 * square + 2 * narrow
    assert shares == pytest.approx(
        {
            "self_attn.q_proj": square / total,
            "self_attn.k_proj": narrow / total,
            "self_attn.v_proj": narrow / total,
            "self_attn.o_proj": square / total,
            "mlp.up_proj": mlp / total,
            "mlp.down_proj": mlp / total,
            DEPTH: 1.0,
        }
    )


def test_experts_have_one_role():
    space = [replace(linear, name_in_layer=f"experts.{i}.w1") for i, linear in enumerate(space_of("32:64"))]
    assert list(factors_of(space)) == [DEPTH]
    space[0] = replace(space[0], name_in_layer="experts.0.w2")
    assert list(factors_of(space)) == ["experts.*.w2", DEPTH]


@pytest.mark.parametrize("pattern", ["32:64", "4:8", "70%", "g4@50%"])
@pytest.mark.parametrize("shifts", [{}, {"self_attn.k_proj": 9.0}, {DEPTH: 24.0, "mlp.down_proj": -13.0}])
def test_a_profile_keeps_the_budget(pattern: str, shifts: dict[str, float]):
    space = space_of(pattern)
    budget = kept_weights(space, uniform_of(space))
    smallest = min(linear.kept[0] - linear.kept[-1] for linear in space)
    kept = kept_weights(space, fitted(space, shifts, budget))
    assert budget - smallest < kept <= budget


def test_a_profile_is_denser_where_it_says():
    space = space_of("32:64")
    budget = kept_weights(space, uniform_of(space))
    assert fitted(space, {}, budget) == uniform_of(space)
    levels = fitted(space, {"self_attn.k_proj": 8.0, DEPTH: 4.0}, budget)
    by_role = {(linear.name_in_layer, linear.decoder_layer): level for linear, level in zip(space, levels, strict=True)}
    for depth in range(5):
        difference = by_role["self_attn.k_proj", depth] - by_role["self_attn.q_proj", depth]
        assert difference in (7, 8, 9)
    assert by_role["mlp.up_proj", 4] - by_role["mlp.up_proj", 0] in (7, 8, 9)


def test_the_steps_follow_the_effects_and_stop_when_worse():
    """log KL = a bowl around k_proj 12 levels denser; k_proj's own level is what counts."""
    space = space_of("32:64")
    keys = [index for index, linear in enumerate(space) if linear.name_in_layer.endswith("k_proj")]
    scores = []

    def kl_of(candidate: tuple[int, ...]) -> float:
        mean = sum(candidate[index] for index in keys) / len(keys)
        scores.append((math.exp((mean - 12) ** 2 / 100), mean, candidate))
        return scores[-1][0]

    search_profile(space, lambda candidates: list(map(kl_of, candidates)), kept_weights(space, uniform_of(space)))
    assert scores[0][2] == uniform_of(space)
    assert len(scores) == 1 + 8 + 3  # steps of some 6 and 12 levels are better, that of 18 is worse
    assert min(scores)[1] == pytest.approx(12, abs=1.5)
    others = [level for index, level in enumerate(min(scores)[2]) if index not in keys]
    assert max(others) - min(others) <= 3


def test_steps_end_at_the_longest():
    space = space_of("32:64")
    scores = []

    def kl_of(candidate: tuple[int, ...]) -> float:
        scores.append(math.exp(-candidate[1] / 10))
        return scores[-1]

    search_profile(space, lambda candidates: list(map(kl_of, candidates)), kept_weights(space, uniform_of(space)))
    assert len(scores) == 1 + 8 + MAX_STEPS


PLAN = replace(recipe("profile", "4:8"), search_tokens=10**6)
TOKENS = sum(batch.numel() for batch in calibration())


class Profiled(NamedTuple):
    """A search by profile, the tokens that each bank was built from, and its calls of progress."""

    result: SearchResult
    seen: list[int]
    calls: list[tuple[int, int]]


def profiled(part: int, journal: Journal | None) -> Profiled:
    """Search on all tokens, or on one in ``part`` of them."""
    seen: list[int] = []
    calls: list[tuple[int, int]] = []

    def build_bank(*arguments, batches, **options):
        seen.append(sum(batch.numel() for batch in batches))
        return real_bank(*arguments, batches=batches, **options)

    def prune_side_by_side(*arguments, batches, candidates, **options):
        seen.extend([sum(batch.numel() for batch in batches)] * len(candidates))
        return real_pruning(*arguments, batches=batches, candidates=candidates, **options)

    real_bank, real_pruning = anew.build_bank, anew.prune_side_by_side
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anew, "build_bank", build_bank)
        patch.setattr(anew, "prune_side_by_side", prune_side_by_side)
        patch.setattr(search, "PROFILE_TOKENS", TOKENS // part)
        result = search_patterns(
            regular_model(), calibration(), PLAN, seed=0, journal=journal,
            progress=lambda _, done, total: calls.append((done, total)),
        )  # fmt: skip
    return Profiled(result, seen, calls)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the journal of `whole` is."""
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def whole(stored: Path) -> Profiled:
    """A search on all tokens, with a journal."""
    return profiled(1, Journal(stored, {}))


@pytest.fixture(scope="module")
def half() -> Profiled:
    """A search on half of the tokens, without a journal."""
    return profiled(2, None)


def test_the_compressed_model_is_what_was_scored(whole: Profiled):
    result = whole.result
    assert result.kl < result.uniform_kl
    assert result.weights.keys() == result.patterns.keys()
    assert 1 + 8 + 2 <= result.evaluations <= 1 + 8 + MAX_STEPS
    dense, sparse = regular_model(), regular_model()
    compress_decoder_layers(sparse, calibration(), PLAN, patterns=result.patterns, pruned=result.weights)
    assert mean_kl(dense, sparse, calibration()) == pytest.approx(result.kl, rel=1e-3)
    again = regular_model()
    compress_decoder_layers(again, calibration(), PLAN, patterns=result.patterns)
    assert mean_kl(dense, again, calibration()) == pytest.approx(result.kl, rel=1e-3), "pruned as a whole"


@pytest.mark.slow
def test_candidates_are_pruned_on_a_part_of_a_long_text_and_the_best_one_on_all(half: Profiled):
    result, batches = half.result, calibration()
    assert result.weights == {}
    assert len(half.seen) == result.evaluations
    assert set(half.seen) == {batches[0].numel()}
    found, all_text = regular_model(), regular_model()
    compress_decoder_layers(found, batches, PLAN, patterns=result.patterns, pruned=result.weights)
    compress_decoder_layers(all_text, batches, PLAN, patterns=result.patterns)
    for (name, weight), other in zip(found.named_parameters(), all_text.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_progress_counts_the_decoder_layers_of_all_candidates(whole: Profiled):
    assert whole.calls == [(done, 5 * (1 + 8 + MAX_STEPS)) for done in range(5 * whole.result.evaluations)]


def test_of_all_candidates_on_the_whole_text_the_best_one_s_weights_are_stored(whole: Profiled, stored: Path):
    sizes = sorted(path.stat().st_size for path in stored.glob("pass-*.safetensors"))
    assert len(sizes) == whole.result.evaluations
    assert sizes[-2] < 1000 < sizes[-1]
    assert list(stored.glob("bank-*.safetensors"))


@pytest.mark.parametrize(("tokens", "kept"), [(10**9, [0, 1, 2, 3, 4, 5, 6]), (1, [0]), (20, [0, 3]), (21, [0, 2, 4])])
def test_a_sample_is_spread_over_the_text(tokens: int, kept: list[int]):
    batches = [torch.full((2, 5), number) for number in range(7)]
    assert [int(batch[0, 0]) for batch in search.sample(batches, tokens)] == kept


@pytest.mark.slow  # test_search.py has it for other searches
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("calls", [3, 64, 7])
def test_resumed_at_any_call_of_progress(
    calls: int, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    """Among the first candidates, and after the best one; a candidate has five calls.

    On the whole text, where weights are kept, and on a part of it, where the journal has the weights of none.
    """
    monkeypatch.setattr(search, "PROFILE_TOKENS", TOKENS // part)
    expected = request.getfixturevalue("whole" if part == 1 else "half").result
    made = []

    def interrupt(stage: str, done: int, total: int) -> None:
        made.append(done)
        if len(made) == calls:
            raise Interrupted

    with pytest.raises(Interrupted):
        search_patterns(regular_model(), calibration(), PLAN, seed=0, progress=interrupt, journal=Journal(tmp_path, {}))
    resumed: list[int] = []
    again = search_patterns(
        regular_model(),
        calibration(),
        PLAN,
        seed=0,
        progress=lambda _, done, __: resumed.append(done),
        journal=Journal(tmp_path, {}),
    )
    assert again == expected
    ends = range(0, 100, 5) if part == 1 else [0, 5 * anew.TOGETHER, *range(5 * 9, 100, 5)]  # of finished candidates
    assert len(resumed) == 5 * expected.evaluations - max(end for end in ends if end < calls)
    for name, masked in expected.weights.items():
        assert torch.equal(masked.values, again.weights[name].values)
    if part == 2:
        assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 1000
        assert not list(tmp_path.glob("bank-*"))
