"""A stored weight may keep as much as its pattern allows, and one more per row, because pruners round."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.base import share_violation
from semisparse.patterns import parse_pattern

ROWS, COLUMNS = 4, 128


@pytest.mark.parametrize(
    ("pattern", "unit", "allowed"),  # of a row of 128 columns: 38 weights, or 4 of 8 groups, and one more
    [
        ("70%/row", 1, 39),
        ("g16@50%/row", 16, 5),
        ("g16@50%/row", 1, 64 + 16),
    ],
)
def test_one_more_per_row_is_allowed(pattern: str, unit: int, allowed: int):
    packed = get_format("dense").pack(torch.zeros(ROWS, COLUMNS), "0%")
    packed = replace(packed, spec=replace(packed.spec, pattern=parse_pattern(pattern)))
    kept = torch.full((ROWS,), allowed)
    assert share_violation(packed, kept, unit) is None
    kept[2] += 1
    assert share_violation(packed, kept, unit) == f"row 2 keeps {allowed + 1}, {allowed} are allowed"


@pytest.mark.parametrize(("pattern", "unit", "allowed"), [("70%", 1, 154 + ROWS), ("g16@50%", 16, 16 + ROWS)])
def test_rows_share_what_is_allowed_of_the_whole_weight(pattern: str, unit: int, allowed: int):
    packed = get_format("dense").pack(torch.zeros(ROWS, COLUMNS), "0%")
    packed = replace(packed, spec=replace(packed.spec, pattern=parse_pattern(pattern)))
    kept = torch.tensor([allowed, 0, 0, 0])
    assert share_violation(packed, kept, unit) is None
    kept[3] += 1
    assert share_violation(packed, kept, unit) == f"{allowed + 1} are kept, {allowed} are allowed"
