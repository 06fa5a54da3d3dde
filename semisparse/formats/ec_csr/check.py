"""The checks that let kernels follow the tensors of a file from a stranger."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.layout import (
    FIELDS,
    FIRST_OFFSET,
    GRANULARITIES,
    LANES,
    NO_SLOT,
    PANEL_ROWS,
    layout_of,
    most_slots,
    sizes_of,
    vector_of,
    widened,
)
from semisparse.formats.ec_csr.read import decode, panel_of_slots, stored_weights
from semisparse.formats.ec_csr.walk import LONG_VECTOR, SHORT_VECTOR


def check_content(packed: Packed) -> None:
    """Check every size, offset, slot and column, and that no weight is stored twice.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    _check_table(packed)
    _check_row_slots(packed)
    if layout_of(packed.params) == "paper":
        _check_slots(packed, packed.tensors["slots"].long())
    else:
        found = most_slots(packed.tensors["row_slots"])
        if packed.params.get("panel_slots") != found:
            raise FormatError(f"params: panel_slots is {packed.params.get('panel_slots')!r}, the rows say {found}")
        _check_slots(packed, _slots_of_panels(packed))
    _check_columns(packed)


def _check_table(packed: Packed) -> None:
    """Check that the bundles fill deltas, values and slots one after another."""
    shared = layout_of(packed.params) == "paper"
    granularity, vector, columns = packed.tensors["bundles"][:, :FIRST_OFFSET].long().T
    sizes = GRANULARITIES[layout_of(packed.params)]
    known = torch.tensor(sizes, device=granularity.device)
    _refuse_first(~torch.isin(granularity, known), "bundles", f"the granularity is none of {sizes}")
    coarsest = max([1, *granularity.tolist()])
    if packed.params.get("granularity") != coarsest:
        raise FormatError(f"params: granularity is {packed.params.get('granularity')!r}, the bundles say {coarsest}")
    if shared:
        _refuse_first((vector != SHORT_VECTOR) & (vector != LONG_VECTOR), "bundles", "the vector is neither 1 nor 4")
    for size in () if shared else sizes:
        wanted = vector_of(size, packed.dtype)
        bad = (granularity == size) & (vector != wanted)
        _refuse_first(bad, "bundles", f"the vector is not {wanted}, as {size} rows of {packed.dtype} ask")
    _refuse_first((columns < 0) | (columns % vector != 0), "bundles", "the columns are no multiple of the vector")
    counts = sizes_of(torch.stack((granularity, vector, columns), 1), 1 if shared else LANES)
    ends = counts.cumsum(0)
    for at, name in enumerate(("deltas", "values", "slots")):
        total = int(ends[-1, at]) if len(ends) else 0
        if total != packed.params[name]:
            raise FormatError(f"tensor bundles describes {total} {name}, params say {packed.params[name]}")
    wrong = packed.tensors["bundles"][:, FIRST_OFFSET:] != ends - counts
    _refuse_first(wrong, "bundles", f"one of {', '.join(FIELDS[FIRST_OFFSET:])} is not where the bundle before it ends")


def _check_row_slots(packed: Packed) -> None:
    starts = packed.tensors["row_slots"].long()
    if starts[0] != 0:
        raise FormatError(f"tensor row_slots begins with {int(starts[0])}, expected 0")
    _refuse_first(starts.diff() < 0, "row_slots", "a row's slots begin before those of the row before it")


def _slots_of_panels(packed: Packed) -> Tensor:
    """Give the slots that are there, as absolute numbers."""
    starts = packed.tensors["row_slots"].long()
    firsts = torch.cat((starts[:-1:PANEL_ROWS], starts[-1:]))
    numbers, panel = widened(packed.tensors["slots"]), panel_of_slots(packed)
    present = numbers != NO_SLOT
    beyond = present & (numbers >= firsts.diff()[panel])
    _refuse_first(beyond, "slots", "the slot is beyond those of its panel's rows")
    return (numbers + firsts[panel])[present]


def _check_slots(packed: Packed, numbers: Tensor) -> None:
    total = int(packed.tensors["row_slots"][-1])
    _refuse_first((numbers < 0) | (numbers >= total), "slots", f"the slot is none of the rows' {total}")
    if len(numbers) != total or not (numbers.bincount(minlength=total) == 1).all():
        raise FormatError(f"tensor slots holds {len(numbers)} slots, expected each of the rows' {total} once")


def _check_columns(packed: Packed) -> None:
    n, k = packed.shape
    bases = widened(packed.tensors["bases"])
    _refuse_first((bases < 0) | (bases >= k), "bases", f"the column is not below K = {k}")
    for steps in decode(packed):
        beyond = steps.column >= k
        if beyond.any():
            at = int(beyond.nonzero()[0])
            raise FormatError(
                f"tensor deltas: lane {int(steps.lane[at])} of bundle {int(steps.bundle[at])} walks to column "
                f"{int(steps.column[at])}, past K = {k}"
            )
    seen = torch.zeros(n * k, dtype=torch.bool, device=bases.device)
    weights = 0
    for places, kept in stored_weights(packed):
        if (places < 0).any():
            raise FormatError("tensor slots: a weight that is not zero belongs to a lane without a row")
        seen[places] = True
        weights += len(kept)
    if int(seen.count_nonzero()) != weights:
        raise FormatError(f"{weights} weights are stored at {int(seen.count_nonzero())} places, expected each once")


def _refuse_first(bad: Tensor, tensor: str, what: str) -> None:
    found = bad.nonzero()
    if len(found):
        raise FormatError(f"tensor {tensor}, at {found[0].tolist()}: {what}")
