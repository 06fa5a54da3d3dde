"""Validate a weight in the layout `paper`, which may come from an untrusted file, before a kernel follows its lists."""

from __future__ import annotations

import torch

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, refuse_first
from semisparse.formats.ec_csr.paper.disk import (
    FIRST_OFFSET,
    GRANULARITIES,
    LONG_VECTOR,
    SHORT_VECTOR,
    decode,
    sizes_of,
    stored_weights,
)
from semisparse.formats.ec_csr.storage.deltas import refuse_repeats, widened


def check_paper(packed: Packed) -> None:
    """Check every size, offset and slot, that every column is below K, and that no weight is stored twice.

    Raises:
        FormatError: a check fails. The message names the tensor and what is wrong.
    """
    _check_table(packed)
    _check_slots(packed)
    k = packed.shape[1]
    refuse_first(widened(packed.tensors["bases"]) >= k, "bases", f"the column is not below K = {k}")
    for entries in decode(packed):
        beyond = entries.column >= k
        if beyond.any():
            at = int(beyond.nonzero()[0])
            lane, bundle, column = (int(t[at]) for t in (entries.lane, entries.bundle, entries.column))
            raise FormatError(
                f"tensor deltas: lane {lane} of bundle {bundle} reaches column {column}, not below K = {k}"
            )
    refuse_repeats(position for position, _ in stored_weights(packed))


def _check_table(packed: Packed) -> None:
    """Check each bundle's sizes, and that the bundles' deltas, values and slots follow each other without gaps."""
    table = packed.tensors["bundles"].long()
    granularity, vector, columns = table[:, :FIRST_OFFSET].T
    known = torch.tensor(GRANULARITIES, device=table.device)
    refuse_first(~torch.isin(granularity, known), "bundles", f"the granularity is none of {GRANULARITIES}")
    coarsest = max([1, *granularity.tolist()])
    if packed.params.get("granularity") != coarsest:
        raise FormatError(f"params: granularity is {packed.params.get('granularity')!r}, the bundles say {coarsest}")
    refuse_first((vector != SHORT_VECTOR) & (vector != LONG_VECTOR), "bundles", "the vector is neither 1 nor 4")
    wrong = (columns < 1) | (columns % vector != 0)
    refuse_first(wrong, "bundles", "the columns per lane are not a positive multiple of the vector")
    sizes = sizes_of(table[:, :FIRST_OFFSET])[:, FIRST_OFFSET:]
    for name, total in zip(("deltas", "values", "slots"), sizes.sum(0).tolist(), strict=True):
        if packed.params[name] != total:
            raise FormatError(f"tensor bundles describes {total} {name}, params say {packed.params[name]!r}")
    wrong = table[:, FIRST_OFFSET:] != sizes.cumsum(0) - sizes
    refuse_first(wrong, "bundles", "an offset is not where the bundle before it ends")


def _check_slots(packed: Packed) -> None:
    """Check that one row of a bundle writes each partial sum, and that a row of w adds a contiguous range of them."""
    starts, slots = packed.tensors["row_slots"].long(), packed.tensors["slots"].long()
    if starts[0] != 0 or starts[-1] != len(slots):
        ends = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor row_slots runs from {ends}, expected 0 to {len(slots)}")
    refuse_first(starts.diff() < 0, "row_slots", "a row's slots begin before those of the row before it")
    refuse_first((slots < 0) | (slots >= len(slots)), "slots", f"the slot is not in 0 to {len(slots) - 1}")
    twice = slots.bincount(minlength=len(slots)) != 1
    refuse_first(twice, "slots", "the bundles do not write this slot exactly once")
