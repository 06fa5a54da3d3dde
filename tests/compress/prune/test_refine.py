"""Masked conjugate gradients against exact least squares on the kept weights."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.compress.prune.refine import conjugate_gradient


def exact(kept: torch.Tensor, hessian: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Solve each row's normal equations on its kept columns."""
    solution = torch.zeros_like(goal)
    for row, mask in enumerate(kept):
        some = mask.nonzero().flatten()
        if len(some):
            right = hessian[some] @ goal[row]
            solution[row, some] = torch.linalg.solve(hessian[some][:, some], right)
    return solution


def random_problem(rows: int, columns: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10 * columns, columns, generator=generator, dtype=torch.float64)
    hessian = x.T @ x / len(x)
    scale = hessian.diagonal().sqrt()
    goal = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    kept = torch.rand(rows, columns, generator=generator) < 0.5
    return kept, hessian / torch.outer(scale, scale), goal


@given(st.integers(1, 20), st.integers(1, 14), st.integers(0, 5))
def test_small_rows_are_solved_exactly(rows: int, columns: int, seed: int):
    kept, hessian, goal = random_problem(rows, columns, seed)
    kept &= kept.cumsum(1) <= 6  # n unknowns take n steps
    solved = conjugate_gradient(goal * kept, kept, hessian, goal)
    torch.testing.assert_close(solved, exact(kept, hessian, goal), rtol=1e-6, atol=1e-6)
    assert not solved[~kept].any()


def test_larger_rows_converge_as_fast_as_theory_says():
    """10 steps reduce the loss above the optimum to at most 4 r^20 of it; r = (sqrt(k) - 1) / (sqrt(k) + 1)."""
    kept, hessian, goal = random_problem(40, 96, seed=0)

    def loss(w: torch.Tensor) -> float:
        return float(((w - goal) @ hessian * (w - goal)).sum())

    best = loss(exact(kept, hessian, goal))
    eigenvalues = torch.linalg.eigvalsh(hessian)
    root = float(eigenvalues[-1] / eigenvalues[0]) ** 0.5
    bound = 4 * ((root - 1) / (root + 1)) ** 20
    start, solved = loss(goal * kept), loss(conjugate_gradient(goal * kept, kept, hessian, goal))
    assert best <= solved <= best + bound * (start - best)
    assert bound < 0.1, "a looser bound would not detect a wrong step"


def test_a_solved_row_and_an_empty_row_stay_where_they_are():
    _, hessian, goal = random_problem(2, 8, seed=0)
    kept = torch.tensor([[True] * 8, [False] * 8])
    start = goal * kept
    assert torch.equal(conjugate_gradient(start, kept, hessian, goal), start)
