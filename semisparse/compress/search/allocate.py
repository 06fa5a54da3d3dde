"""Allocate: pick one option per unit so that a sum of losses is least and no sum of costs is above its limit.

A multiple-choice knapsack with several limits: Lagrange multipliers, then moves of one and two units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semisparse.errors import InputError

ITERATIONS = 300
"""Updates of the multipliers per start. The moves then close the gap that remains."""

HALVINGS = 60
"""Halvings of the range of a single multiplier's logarithm."""

MOVES = 500
"""Maximum number of moves; each lowers the loss."""

MAX_SINGLES = 3000
"""Maximum number of moves of one unit of which all pairs are tried."""


class Unreachable(InputError):
    """No allocation keeps every limit.

    Args:
        message: what cannot be kept.
        least: the least total of each cost that any allocation has.
    """

    def __init__(self, message: str, least: Mapping[str, float]) -> None:
        super().__init__(message)
        self.least = least


def allocate(
    losses: Sequence[Sequence[float]], costs: Sequence[Sequence[Mapping[str, float]]], limits: Mapping[str, float]
) -> tuple[int, ...]:
    """Return the index of an option per unit.

    Args:
        losses: [units][options], any finite numbers.
        costs: [units][options], each with the keys of ``limits``.
        limits: the largest total of each cost.
    Raises:
        Unreachable: no allocation is known that keeps the limits.
    """
    options = max(map(len, losses))
    loss = torch.tensor([[*row, *[math.inf] * (options - len(row))] for row in losses], dtype=torch.float64)
    # Costs as shares of their limits: every limit is 1.
    share = torch.stack(
        [
            torch.tensor(
                [[cost[name] / limit for cost in row] + [math.inf] * (options - len(row)) for row in costs],
                dtype=torch.float64,
            )
            for name, limit in limits.items()
        ]
    )
    least = share.amin(2).sum(1)
    for name, total in zip(limits, least.tolist(), strict=True):
        if total > 1 + 1e-9:
            raise Unreachable(f"no choice of layers reaches the target for {name}", _least(limits, least))
    best, nearest = (_by_bisection if len(share) == 1 else _by_multipliers)(loss, share)
    if best is None:
        best = _repaired(nearest, share)
    if best is None:
        raise Unreachable("no choice of layers reaches all targets together", _least(limits, least))
    return tuple(_by_moves(best, loss, share).tolist())


def _least(limits: Mapping[str, float], shares: Tensor) -> dict[str, float]:
    return {name: limit * share for (name, limit), share in zip(limits.items(), shares.tolist(), strict=True)}


def _totals(table: Tensor, picks: Tensor) -> Tensor:
    """Sum a table [..., units, options] over the picked options [units]."""
    return table.gather(-1, picks.expand(table.shape[:-1])[..., None]).squeeze(-1).sum(-1)


def _violation(totals: Tensor) -> Tensor:
    """Return by how much totals [limits, ...] are above 1, summed over the limits."""
    return (totals - 1 - 1e-9).clamp_min(0).sum(0)


def _by_bisection(loss: Tensor, share: Tensor) -> tuple[Tensor | None, Tensor]:
    """Search for the multiplier of a single limit, as `_by_multipliers` does; the cost falls as it grows."""
    finite = loss[loss.isfinite()]
    scale = math.log(float(finite.max() - finite.min()) * len(loss) or 1.0)
    low, high, best, nearest = scale - 25.0, scale + 25.0, None, loss.argmin(1)
    if float(_violation(_totals(share, nearest))) == 0:
        return nearest, nearest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        picks = torch.nan_to_num(loss + math.exp(middle) * share[0], nan=math.inf).argmin(1)
        if float(_violation(_totals(share, picks))) == 0:
            high, best, nearest = middle, picks, picks
        else:
            low, nearest = middle, nearest if best is not None else picks
    return best, nearest


def _by_multipliers(loss: Tensor, share: Tensor) -> tuple[Tensor | None, Tensor]:
    """Search for multipliers; return the best feasible picks (None if there are none) and the least violating ones."""
    finite = loss[loss.isfinite()]
    scale = float(finite.max() - finite.min()) * len(loss) or 1.0
    best, best_loss = None, math.inf
    nearest, least_violation = loss.argmin(1), math.inf
    for start in (1e-3 * scale, scale, 1e6 * scale):  # the last finds some feasible picks: costs outweigh losses
        multipliers = torch.full((len(share),), start, dtype=torch.float64)
        for iteration in range(ITERATIONS):
            picks = torch.nan_to_num(loss + (multipliers[:, None, None] * share).sum(0), nan=math.inf).argmin(1)
            totals = _totals(share, picks)
            total_loss, violation = float(_totals(loss, picks)), float(_violation(totals))
            if violation < least_violation:
                nearest, least_violation = picks, violation
            if violation == 0 and total_loss < best_loss:
                best, best_loss = picks, total_loss
            step = 4.0 / (1 + iteration / 10)
            multipliers = multipliers * ((totals - 1).clamp(-1, 1) * step).exp()
    return best, nearest


def _repaired(picks: Tensor, share: Tensor) -> Tensor | None:
    """Return feasible picks that moves of one or two units lead to; None if they lead to none."""
    units, options = share.shape[1:]
    unit_of = torch.arange(units).repeat_interleave(options)
    option_of = torch.arange(options).repeat(units)
    for _ in range(MOVES):
        totals = _totals(share, picks)
        violation = float(_violation(totals))
        if violation == 0:
            return picks
        cost = (share - share.gather(2, picks.expand(len(share), -1)[..., None])).flatten(1)
        # Moves that change nothing are included, so that pairs cover single moves.
        moves = cost.isfinite().all(0).nonzero().flatten()
        moves = moves[cost[:, moves].amin(0).argsort()[:MAX_SINGLES]]
        pairs = _violation(totals[:, None, None] + cost[:, moves, None] + cost[:, None, moves])
        pairs = torch.where(unit_of[moves][:, None] != unit_of[moves], pairs, math.inf)
        if not pairs.numel() or float(pairs.min()) >= violation:
            return None
        picks = picks.clone()
        for move in divmod(int(pairs.argmin()), len(moves)):
            picks[unit_of[moves[move]]] = option_of[moves[move]]
    return None


def _by_moves(picks: Tensor, loss: Tensor, share: Tensor) -> Tensor:
    """Improve feasible picks by moves of one or two units until none gains."""
    units, options = loss.shape
    unit_of = torch.arange(units).repeat_interleave(options)
    option_of = torch.arange(options).repeat(units)
    for _ in range(MOVES):
        slack = 1 + 1e-9 - _totals(share, picks)
        change = (loss - loss.gather(1, picks[:, None])).flatten()
        cost = (share - share.gather(2, picks.expand(len(share), -1)[..., None])).flatten(1)
        valid = change.isfinite() & (option_of != picks[unit_of])
        single = torch.where(valid & (cost <= slack[:, None]).all(0), change, math.inf)
        gain, at = float(single.min()), int(single.argmin())
        pair = _best_pair(change, cost, valid, slack, unit_of)
        if min(gain, pair[0]) >= -1e-15:
            return picks
        picks = picks.clone()
        for move in (at,) if gain <= pair[0] else pair[1:]:
            picks[unit_of[move]] = option_of[move]
    return picks


def _best_pair(change: Tensor, cost: Tensor, valid: Tensor, slack: Tensor, unit_of: Tensor) -> tuple[float, int, int]:
    """Return the change of loss of the best move of two units, and the two moves."""
    moves = valid.nonzero().flatten()
    if len(moves) > MAX_SINGLES:
        moves = moves[change[moves].abs().argsort()[:MAX_SINGLES]]
    total = change[moves][:, None] + change[moves]
    fits = unit_of[moves][:, None] != unit_of[moves]
    for each, room in zip(cost, slack.tolist(), strict=True):
        fits &= each[moves][:, None] + each[moves] <= room
    total = torch.where(fits, total, math.inf)
    if not total.numel():
        return math.inf, 0, 0
    first, second = divmod(int(total.argmin()), len(moves))
    return float(total.min()), int(moves[first]), int(moves[second])
