"""Patterns against their definitions, written as plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import PatternError
from semisparse.patterns import NM, Group, Pattern, Unstructured, VectorNM, parse_pattern

percents = st.sampled_from([0, 12.5, 30, 50, 62.5, 70, 87.5, 90])
windows = st.sampled_from([4, 6, 8, 10, 32, 64])


@st.composite
def nm(draw) -> NM:
    window = draw(windows)
    return NM(draw(st.integers(1, window)), window)


patterns = st.one_of(
    nm(),
    st.builds(lambda p, length: VectorNM(p.keep, p.window, length), nm(), st.sampled_from([1, 4, 32])),
    st.builds(Group, st.sampled_from([1, 4, 16, 64]), percents, st.booleans()),
    st.builds(Unstructured, percents, st.booleans()),
)
shapes = st.tuples(st.integers(1, 40), st.integers(1, 200))


def random_scores(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


@given(patterns)
def test_written_form_parses_back(pattern: Pattern):
    assert parse_pattern(str(pattern)) == pattern


@pytest.mark.parametrize(
    "text", ["", "8", "9:8", "0:4", "6-8", "8:32v0", "g16", "g0@50%", "100%", "-5%", "50%/col", "2:4:8", "２:４"]
)
def test_unreadable_text_is_refused(text: str):
    with pytest.raises(PatternError):
        parse_pattern(text)


@given(patterns, shapes)
def test_a_chosen_mask_obeys_its_pattern(pattern: Pattern, shape: tuple[int, int]):
    scores = random_scores(shape)
    pattern.check(scores * pattern.mask(scores))


@given(nm(), shapes)
def test_nm_keeps_the_best_of_each_window(pattern: NM, shape: tuple[int, int]):
    scores = random_scores(shape)
    mask = pattern.mask(scores)
    for row in range(shape[0]):
        for start in range(0, shape[1], pattern.window):
            window = scores[row, start : start + pattern.window]
            keep = -(-pattern.keep * len(window) // pattern.window)
            kept = mask[row, start : start + pattern.window]
            assert kept.sum() == keep
            assert set(window[kept].tolist()) == set(window.sort(descending=True).values[:keep].tolist())


@given(nm(), st.sampled_from([1, 4, 32]), shapes)
def test_vector_nm_is_nm_over_summed_rows(pattern: NM, length: int, shape: tuple[int, int]):
    scores = random_scores(shape)
    mask = VectorNM(pattern.keep, pattern.window, length).mask(scores)
    for start in range(0, shape[0], length):
        rows = slice(start, start + length)
        expected = pattern.mask(scores[rows].sum(0, keepdim=True))
        assert torch.equal(mask[rows], expected.expand_as(mask[rows]))


@given(percents, st.booleans(), shapes)
def test_unstructured_keeps_the_exact_count_of_the_best(percent: float, by_row: bool, shape: tuple[int, int]):
    scores = random_scores(shape)
    mask = Unstructured(percent, by_row).mask(scores)
    parts = zip(scores, mask, strict=True) if by_row else [(scores.flatten(), mask.flatten())]
    for part, kept in parts:
        keep = len(part) - round(len(part) * percent / 100)
        assert kept.sum() == keep
        assert keep == 0 or keep == len(part) or part[kept].min() >= part[~kept].max()


@given(st.sampled_from([1, 4, 16, 64]), percents, shapes)
def test_groups_are_kept_or_pruned_whole(size: int, percent: float, shape: tuple[int, int]):
    scores = random_scores(shape)
    mask = Group(size, percent).mask(scores)
    kept = 0
    for row in mask:
        for group in row.split(size):
            assert group.all() or not group.any()
            kept += int(group.any())
    total = shape[0] * -(-shape[1] // size)
    assert kept == total - round(total * percent / 100)


def test_ties_go_to_the_lower_column():
    assert NM(2, 4).mask(torch.ones(1, 8)).tolist() == [[True, True, False, False] * 2]
    assert Unstructured(50).mask(torch.ones(1, 4)).tolist() == [[True, True, False, False]]
    assert Unstructured(50).mask(torch.tensor([[1.0, 1, 1, 2]])).tolist() == [[True, False, False, True]]


@pytest.mark.parametrize(
    ("pattern", "spoil", "where"),
    [
        ("2:4", (3, slice(8, 12)), "row 3, columns 8 to 11 (block 2) hold 4 non-zeros, at most 2"),
        ("2:4v4", (3, slice(8, 12)), "vector row 0, columns 8 to 11"),
        ("g4@50%/row", (3, slice(0, 32)), "row 3 holds 8 non-zeros of 8, 4"),
        ("50%/row", (3, slice(0, 32)), "row 3 holds 32 non-zeros of 32, 16"),
        ("50%", (slice(None), slice(0, 32)), "256 of 256 weights are non-zero, 128"),
    ],
)
def test_a_broken_pattern_is_located(pattern: str, spoil, where: str):
    parsed = parse_pattern(pattern)
    scores = random_scores((8, 32))
    weight = scores * parsed.mask(scores)
    weight[spoil] = 1.0
    with pytest.raises(PatternError) as caught:
        parsed.check(weight)
    assert where in str(caught.value)


@pytest.mark.parametrize("pattern", ["6:8", "8:32v32", "g16@50%", "70%", "70%/row"])
def test_density_is_what_large_masks_have(pattern: str):
    parsed = parse_pattern(pattern)
    assert parsed.mask(random_scores((64, 640))).float().mean().item() == pytest.approx(parsed.density, abs=1e-3)


@given(patterns, shapes)
def test_kept_is_what_the_mask_keeps(pattern: Pattern, shape: tuple[int, int]):
    if isinstance(pattern, Group) and shape[1] % pattern.size:
        shape = (shape[0], -(-shape[1] // pattern.size) * pattern.size)  # a short group counts as a full one
    assert pattern.kept(shape) == int(pattern.mask(random_scores(shape)).sum())


@given(patterns, shapes, st.integers(-70, 70))
def test_a_shifted_pattern_keeps_that_much_more(pattern: Pattern, shape: tuple[int, int], steps: int):
    shifted = pattern.shifted(steps, shape)
    if isinstance(pattern, NM | VectorNM):
        assert (shifted is None) == (not 1 <= pattern.keep + steps <= pattern.window)
        assert shifted is None or shifted.keep == pattern.keep + steps
        return
    size = pattern.size if isinstance(pattern, Group) else 1
    columns = -(-shape[1] // size)
    budget, budgets = (columns, shape[0]) if pattern.by_row else (shape[0] * columns, 1)
    gained = steps * max(1, budget // 64) * budgets * size
    assert (shifted is not None) == (0 < pattern.kept(shape) + gained <= budget * budgets * size)
    if shifted is not None:
        assert shifted.kept(shape) == pattern.kept(shape) + gained
        assert parse_pattern(str(shifted)) == shifted


@pytest.mark.parametrize(
    ("pattern", "levels"),
    [("6:8", 8), ("8:32v32", 32), ("50%", 64), ("50%/row", 64), ("g16@50%", 64), ("g16@50%/row", 8)],
)
def test_levels_count_the_steps_from_nothing_to_everything(pattern: str, levels: int):
    shape = (64, 128)
    parsed = parse_pattern(pattern)
    assert parsed.levels(shape) == levels
    whole = parsed.shifted(levels - round(parsed.density * levels), shape)
    assert whole.kept(shape) == 64 * 128
    least = whole.shifted(1 - levels, shape)
    assert least.kept(shape) * levels == 64 * 128
    assert least.shifted(-1, shape) is None
    assert whole.shifted(1, shape) is None
