"""The weights that every format is tested with, beside the cases it declares itself."""

import functools

import torch
from torch import Tensor

from semisparse.formats import Case, registry
from semisparse.patterns import Pattern, parse_pattern

PATTERNS = ("32:64", "2:4", "6:8", "8:10", "8:32v32", "g16@50%", "g16@50%/row", "70%", "70%/row")
OPTIONS = {"paper": {"layout": "paper", "multiple": 32}}
"""Pack options of a kernel that none of its format's variants chooses."""

SHAPES = ((1, 1), (1, 172), (7, 1), (3, 64), (33, 130), (40, 172))


def random(scores: Tensor) -> Tensor:
    return scores


def all_zero(scores: Tensor) -> Tensor:
    return scores * 0


def empty_rows(scores: Tensor) -> Tensor:
    scores[::2] = 0
    return scores


def empty_blocks(scores: Tensor) -> Tensor:
    scores[:, 64:128] = 0
    scores[: len(scores) // 2, :64] = 0
    return scores


def full_rows(scores: Tensor) -> Tensor:
    """The first rows take all that the pattern lets one row have."""
    scores[:2] *= 1e4
    return scores


FILLS = (random, all_zero, empty_rows, empty_blocks, full_rows)


def build(pattern: Pattern, fill, n: int, k: int) -> Tensor:
    """Give a weight [N, K] float32 that obeys ``pattern``; its dead weights are 0.0 and -0.0."""
    weight = fill(torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k)))
    return weight * pattern.mask(weight.abs()) / 8


def accepted_patterns(chosen: str) -> list[str]:
    return [p for p in PATTERNS if registry()[chosen].accepts(parse_pattern(p)) is None]


@functools.cache
def cases_of(chosen: str) -> list[Case]:
    """Every accepted pattern at one shape; one of each family with every shape and every fill; the format's own."""
    accepted = accepted_patterns(chosen)
    families = {type(parse_pattern(p)): p for p in reversed(accepted)}.values()
    wanted = [(p, random, 33, 172) for p in accepted]
    wanted += [(p, random, n, k) for p in families for n, k in SHAPES]
    wanted += [(p, fill, 19, 200) for p in families for fill in FILLS]
    made = [
        Case(f"{p}-{fill.__name__}-{n}x{k}", p, functools.partial(build, parse_pattern(p), fill, n, k))
        for p, fill, n, k in wanted
    ]
    return made + list(registry()[chosen].cases)
