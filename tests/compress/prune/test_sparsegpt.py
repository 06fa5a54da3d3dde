"""SparseGPT against textbook optimal brain surgeon: explicit inverses, one column at a time, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.compress.prune.factor import factorise
from semisparse.compress.prune.masks import EQUATION_4, MASK_COLUMNS_BY_ROW, PUBLISHED, REPEATED, MaskRule
from semisparse.compress.prune.order import losses, order_by_loss
from semisparse.compress.prune.sparsegpt import UPDATE_COLUMNS, prune_columns
from semisparse.patterns import NM, Group, Pattern, Unstructured, VectorNM, parse_pattern


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight whose columns are of unequal importance, and the Hessian of correlated inputs, its diagonal all one."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(4 * columns, columns, generator=generator) @ mixing
    hessian = x.T @ x
    scale = hessian.diagonal().sqrt()
    strength = torch.randn(columns, generator=generator).exp()
    return torch.randn(rows, columns, generator=generator) * strength, hessian / torch.outer(scale, scale)


def surgeon(weight: Tensor, hessian: Tensor, pattern: Pattern, rule: MaskRule) -> Tensor:
    """Prune column after column; update the remaining weights by the closed formula of optimal brain surgeon."""
    weight, hessian = weight.double().clone(), hessian.double()
    columns = weight.shape[1]
    inverses = [torch.linalg.inv(hessian[i:, i:]) for i in range(columns)]
    kept = torch.ones_like(weight, dtype=torch.bool)
    whole = isinstance(pattern, Unstructured | Group) and not pattern.by_row
    shares = Shares(pattern, weight) if whole and rule.one_threshold else None
    divisors = [inverses[0][j, j] ** 2 if rule.literal else inverses[j][0, 0] for j in range(columns)]
    for start, stop, again in spans(pattern, columns, rule):
        entries = torch.stack(divisors[start:]) if rule.literal else inverses[start].diagonal()
        wanted = shares.next(weight, entries, start, stop) if shares else None
        for i in range(start, stop):
            if (i - start) % again == 0:
                cost = torch.stack([weight[:, j] ** 2 / divisors[j] for j in range(i, stop)], dim=1)
                kept[:, i:stop] = choose(cost, kept[:, start:i], pattern, start, wanted)
            for row in range(len(weight)):
                if not kept[row, i]:
                    weight[row, i:] -= weight[row, i] / inverses[i][0, 0] * inverses[i][0]
    return weight * kept


class Shares:
    """How much each span keeps of a pattern over the whole matrix: one threshold on the costs of columns from it on.

    As in `prune_columns`, the columns after a block of `UPDATE_COLUMNS` have not been updated since the block began.
    """

    def __init__(self, pattern: Unstructured | Group, weight: Tensor) -> None:
        self.pattern, self.seen = pattern, weight.clone()
        count = len(weight) * math.ceil(weight.shape[1] / pattern.step)
        self.left = round(count * pattern.percent / 100)

    def next(self, weight: Tensor, divisors: Tensor, start: int, stop: int) -> int:
        """Return how many weights or groups the span keeps."""
        if start % UPDATE_COLUMNS == 0:
            self.seen = weight.clone()
        end = start - start % UPDATE_COLUMNS + UPDATE_COLUMNS
        current = torch.cat((weight[:, start:end], self.seen[:, end:]), dim=1)
        cost = current**2 / divisors
        size = self.pattern.step
        by_unit = torch.stack([part.mean(1) for part in cost.split(size, dim=1)], dim=1)
        span = by_unit[:, : math.ceil((stop - start) / size)]
        ranked = by_unit.flatten().sort().values
        lost = int((span <= ranked[self.left - 1]).sum()) if self.left else 0
        lost = min(max(lost, self.left - (by_unit.numel() - span.numel())), self.left, span.numel())
        self.left -= lost
        return span.numel() - lost


def spans(pattern: Pattern, columns: int, rule: MaskRule) -> list[tuple[int, int, int]]:
    """Spans of columns whose mask is chosen together: first column, end, and after how many columns it is updated."""
    width, size = pattern.step, pattern.step if isinstance(pattern, Group) else 1
    if isinstance(pattern, Unstructured | Group):
        wanted = MASK_COLUMNS_BY_ROW if pattern.by_row else rule.strip
        while width < wanted:
            width += pattern.step
    again = size
    while again + size <= width // rule.updates:
        again += size
    return [(start, min(start + width, columns), again) for start in range(0, columns, width)]


def choose(cost: Tensor, kept: Tensor, pattern: Pattern, start: int, wanted: int | None) -> Tensor:
    """Choose the weights to keep in the rest of a span that begins at column `start`.

    Args:
        cost: of pruning each weight of the rest.
        kept: the mask of the columns that are pruned already.
        wanted: how many weights or groups the span keeps, for patterns over the whole matrix.
    """
    done, left = units(kept.double(), pattern), units(cost, pattern)
    columns = kept.shape[1] + cost.shape[1]
    if isinstance(pattern, NM | VectorNM):
        wanted = math.ceil(pattern.keep * columns / pattern.window)
    elif wanted is None:  # counted from column 0, so that rounding does not accumulate
        counts = [math.ceil(end / pattern.step) for end in (start, start + columns)]
        dropped = [round(count * pattern.percent / 100) for count in counts]
        share = (dropped[1] - dropped[0]) / (counts[1] - counts[0])  # of each row, or of the whole span
        count = math.ceil(columns / pattern.step) * (1 if pattern.by_row else len(cost))
        wanted = count - round(count * share)
    chosen = torch.zeros_like(left, dtype=torch.bool)
    for cost_of_line, done_of_line, of_line in zip(left, done, chosen, strict=True):
        room = wanted - int((done_of_line > 0).sum())
        of_line[cost_of_line.argsort(descending=True)[:room]] = True
    if isinstance(pattern, VectorNM):
        return chosen.repeat_interleave(pattern.length, dim=0)[: len(cost)]
    size = pattern.step if isinstance(pattern, Group) else 1
    return chosen.view(len(cost), -1).repeat_interleave(size, dim=1)[:, : cost.shape[1]]


def units(x: Tensor, pattern: Pattern) -> Tensor:
    """Sum or average what is kept or pruned as a whole; one row for each set that a mask chooses from."""
    if isinstance(pattern, VectorNM):
        return torch.stack([part.sum(0) for part in x.split(pattern.length)])
    if isinstance(pattern, Group) and x.shape[1]:
        x = torch.stack([part.mean(1) for part in x.split(pattern.size, dim=1)], dim=1)
    return x if isinstance(pattern, NM) or pattern.by_row else x.reshape(1, -1)


@pytest.mark.parametrize(
    "pattern",
    [
        "2:4",
        "6:8",
        "7:10",
        "32:64",
        "8:32v4",
        "3:8v5",
        "g8@50%",
        "g8@50%/row",
        "g3@50%/row",
        "g16@30%",
        "50%",
        "70%/row",
        "0%",
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(12, 64), (7, 150)])
def test_against_optimal_brain_surgeon(pattern: str, rows: int, columns: int):
    compare_with_surgeon(pattern, rows, columns, REPEATED)


@pytest.mark.parametrize("rule", [PUBLISHED, EQUATION_4], ids=["published", "eq4"])
@pytest.mark.parametrize("pattern", ["2:4", "32:64", "g8@50%", "50%", "70%/row"])
def test_other_rules_against_optimal_brain_surgeon(pattern: str, rule: MaskRule):
    compare_with_surgeon(pattern, 7, 150, rule)


@pytest.mark.parametrize("pattern", ["70%", "g8@50%"])
def test_one_threshold_serves_columns_of_unequal_importance(pattern: str):
    """If each strip lost the same fraction, important columns would lose as many weights as the others."""
    weight, hessian = problem(24, 256)
    upper = factorise(hessian, 0.01).upper
    errors = []
    for rule in (REPEATED, MaskRule(one_threshold=False)):
        change = prune_columns(weight, upper, parse_pattern(pattern), rule=rule)[0] - weight
        errors.append(float((change @ hessian * change).sum().sqrt()))
    assert errors[0] < 0.95 * errors[1]


def compare_with_surgeon(pattern: str, rows: int, columns: int, rule: MaskRule) -> None:
    weight, hessian = problem(rows, columns)
    damped = hessian + 0.01 * torch.eye(columns)
    expected = surgeon(weight, damped, parse_pattern(pattern), rule)
    factor = factorise(hessian, 0.01)
    pruned, kept = prune_columns(weight, factor.upper, parse_pattern(pattern), rule=rule)
    assert torch.equal(kept, expected != 0)
    # The Hessian's condition number is below 1e3: float32 (6e-8) leaves 1e-4 at most, of the largest weight.
    bound = 1e-4 * float(weight.abs().max())
    torch.testing.assert_close(pruned.double(), expected, rtol=1e-4, atol=bound)


@given(
    st.sampled_from(["6:8", "5:8v3", "g6@40%", "g6@70%/row", "30%/row", "90%/row", "33%", "0%", "10:64"]),
    st.integers(1, 20),
    st.integers(1, 200),
)
def test_every_shape_obeys_its_pattern(text: str, rows: int, columns: int):
    pattern = parse_pattern(text)
    weight, hessian = problem(rows, columns, seed=rows)
    pruned, kept = prune_columns(weight, factorise(hessian, 0.01).upper, pattern)
    assert pruned.isfinite().all()
    assert not pruned[~kept].any()
    pattern.check(pruned)
    one_a_group = slice(None, None, pattern.size if isinstance(pattern, Group) else 1)
    in_one_go = pattern.mask(weight.abs())
    assert kept[:, one_a_group].sum() == in_one_go[:, one_a_group].sum(), "the number of kept weights is exact"


def test_upper_factor_gives_the_inverse():
    _, hessian = problem(1, 40)
    upper, damping, _ = factorise(hessian, 0.01)
    assert damping == 0.01
    assert torch.equal(upper, upper.triu())
    inverse = torch.linalg.inv(hessian.double() + 0.01 * torch.eye(40))
    torch.testing.assert_close((upper.T @ upper).double(), inverse, rtol=1e-3, atol=1e-3)


def indefinite(eigenvalue: float, columns: int = 16) -> Tensor:
    """A matrix of unit diagonal, all other entries equal, whose smallest eigenvalue is `eigenvalue`."""
    return torch.full((columns, columns), 1 - eigenvalue) + eigenvalue * torch.eye(columns)


@pytest.mark.parametrize(
    ("eigenvalue", "damping", "outcome"),
    [
        (0.1, 0.01, "sparsegpt"),
        (0.0, 0.01, "sparsegpt"),
        (-0.05, 0.01, "sparsegpt damping 0.1"),
        (-0.5, 0.01, "sparsegpt damping 1"),
        (0.0, 1e-12, "sparsegpt fp64"),
        (-2.0, 0.01, None),
    ],
)
def test_singular_hessians(eigenvalue: float, damping: float, outcome: str | None):
    factor = factorise(indefinite(eigenvalue), damping)
    assert (factor.outcome if factor else None) == outcome


def test_windows_are_ordered_by_loss():
    hessian = torch.eye(10)
    weight = torch.tensor([[1.0, 1, 9, 9, 3, 3, 9, 9, 7, 7]])
    factor = factorise(hessian, 1e-6)
    pattern = parse_pattern("2:4")
    loss = losses(weight, factor, pattern)
    order = order_by_loss(loss, pattern, windows=True)
    assert order.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9], "a short last window stays last"
    assert order_by_loss(loss, pattern, windows=False).tolist() == list(range(10))


@pytest.mark.parametrize(("windows", "first"), [(False, (0, 16)), (True, (16, 0))])
def test_columns_of_wide_windows_are_ordered_by_loss(windows: bool, first: tuple[int, int]):
    lost = torch.tensor([3, 1, 0, 2, 4, 7, 5, 6])
    short = torch.tensor([2.0, 5, 1, 4])  # two of these four are kept
    weight = torch.cat((lost, torch.full((8,), 50), lost + 10, torch.full((8,), 50), short)).view(1, -1).float()
    factor = factorise(torch.eye(36), 1e-6)
    wide = parse_pattern("8:16")
    order = order_by_loss(losses(weight, factor, wide), wide, windows=windows).tolist()
    worst_first = [5, 7, 6, 4, 0, 3, 1, 2, *range(8, 16)]
    assert order == [start + i for start in first for i in worst_first] + [32, 34, 33, 35]  # worst: 32
    for pattern in map(parse_pattern, ("4:8", "g16@50%", "50%")):
        narrow = order_by_loss(losses(weight, factor, pattern), pattern, windows=False)
        assert narrow.tolist() == list(range(36)), pattern
