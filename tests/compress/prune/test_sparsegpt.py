"""SparseGPT against optimal brain surgery done by the book: explicit inverses, one column at a time, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.compress.prune import sparsegpt
from semisparse.compress.prune.sparsegpt import factorise, order_by_loss, prune_columns
from semisparse.patterns import NM, Group, Pattern, Unstructured, VectorNM, parse_pattern


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the Hessian of correlated inputs scaled to a unit diagonal."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(4 * columns, columns, generator=generator) @ mixing
    hessian = x.T @ x
    scale = hessian.diagonal().sqrt()
    return torch.randn(rows, columns, generator=generator), hessian / torch.outer(scale, scale)


def surgery(weight: Tensor, hessian: Tensor, pattern: Pattern) -> Tensor:
    """Prune column after column; the remaining weights move by the closed formula of optimal brain surgery."""
    weight, hessian = weight.double().clone(), hessian.double()
    columns = weight.shape[1]
    inverses = [torch.linalg.inv(hessian[i:, i:]) for i in range(columns)]
    kept = torch.ones_like(weight, dtype=torch.bool)
    for start, stop in spans(pattern, columns):
        cost = torch.stack([weight[:, j] ** 2 / inverses[j][0, 0] for j in range(start, stop)], dim=1)
        kept[:, start:stop] = choose(cost, pattern, start, stop)
        for i in range(start, stop):
            for row in range(len(weight)):
                if not kept[row, i]:
                    weight[row, i:] -= weight[row, i] / inverses[i][0, 0] * inverses[i][0]
    return weight * kept


def spans(pattern: Pattern, columns: int) -> list[tuple[int, int]]:
    width = pattern.step
    if isinstance(pattern, Unstructured | Group):
        wanted = sparsegpt.SHARED_COLUMNS_BY_ROW if pattern.by_row else sparsegpt.SHARED_COLUMNS
        while width < wanted:
            width += pattern.step
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]


def choose(cost: Tensor, pattern: Pattern, start: int, stop: int) -> Tensor:
    """Keep all but the cheapest; a share is counted from the first column on, so that no rounding adds up."""
    if isinstance(pattern, NM | VectorNM):
        return pattern.mask(cost)
    size = pattern.step
    groups = torch.stack([part.mean(1) for part in cost.split(size, dim=1)], dim=1)
    lines = groups if pattern.by_row else groups.reshape(1, -1)

    def dropped(columns: int) -> int:
        count = -(-columns // size) * (1 if pattern.by_row else len(cost))
        return round(count * pattern.percent / 100)

    kept = torch.ones_like(lines, dtype=torch.bool)
    for line, of_line in zip(lines, kept, strict=True):
        of_line[line.argsort()[: dropped(stop) - dropped(start)]] = False
    return kept.view_as(groups).repeat_interleave(size, dim=1)[:, : stop - start]


@pytest.mark.parametrize(
    "pattern",
    ["2:4", "6:8", "7:10", "32:64", "8:32v4", "3:8v5", "g8@50%", "g8@50%/row", "g16@30%", "50%", "70%/row", "0%"],
)
@pytest.mark.parametrize(("rows", "columns"), [(12, 64), (7, 150)])
def test_against_surgery(pattern: str, rows: int, columns: int):
    weight, hessian = problem(rows, columns)
    damped = hessian + 0.01 * torch.eye(columns)
    expected = surgery(weight, damped, parse_pattern(pattern))
    factor = factorise(hessian, 0.01)
    pruned, kept = prune_columns(weight, factor.upper, parse_pattern(pattern))
    assert torch.equal(kept, expected != 0)
    # The Hessian's condition number is below 1e3: float32 (6e-8) leaves 1e-4 at most.
    torch.testing.assert_close(pruned.double(), expected, rtol=1e-4, atol=1e-4)


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
    assert kept[:, one_a_group].sum() == in_one_go[:, one_a_group].sum(), "a share is kept exactly"


def test_upper_factor_gives_the_inverse():
    _, hessian = problem(1, 40)
    upper, damping, _ = factorise(hessian, 0.01)
    assert damping == 0.01
    assert torch.equal(upper, upper.triu())
    inverse = torch.linalg.inv(hessian.double() + 0.01 * torch.eye(40))
    torch.testing.assert_close((upper.T @ upper).double(), inverse, rtol=1e-3, atol=1e-3)


def indefinite(eigenvalue: float, columns: int = 16) -> Tensor:
    """Unit diagonal, with all correlations equal so that the smallest eigenvalue is the one wanted."""
    share = 1 - eigenvalue
    return torch.full((columns, columns), share) + eigenvalue * torch.eye(columns)


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


def test_windows_are_ordered_by_what_they_lose():
    hessian = torch.eye(10)
    weight = torch.tensor([[1.0, 1, 9, 9, 3, 3, 9, 9, 7, 7]])
    order = order_by_loss(weight, factorise(hessian, 1e-6), parse_pattern("2:4"))
    assert order.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9], "a short last window stays last"
