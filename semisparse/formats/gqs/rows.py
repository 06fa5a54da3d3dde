"""The layout ``rows``: groups in the order of the rows, each with its column, for one to four tokens on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, TensorSpec
from semisparse.formats.gqs import pack

STEP = 32
"""Groups that a warp multiplies at once, all of one row."""

MOST_GROUPS = 1 << 16
"""Of a row: a column has 16 bits."""

SPECS = (
    TensorSpec("steps", torch.int32, ("steps+1", "pair")),
    TensorSpec("begins", torch.int32, ("N+1",)),
    TensorSpec("codes", torch.uint8, ("kept", "code_bytes")),
    TensorSpec("heads", torch.int32, ("kept",)),
    TensorSpec("zero", torch.uint8, ("kept",)),
)


def counts(n: int, k: int, size: int, params: Mapping[str, int | float | str]) -> Mapping[str, int]:
    """Give the steps, the groups stored and the bytes of one group's codes."""
    if -(-k // size) > MOST_GROUPS:
        raise ValueError(f"layout rows numbers {MOST_GROUPS} groups a row, K = {k} has {-(-k // size)}")
    code_bytes = size * pack.bits_of(params, size) // 8
    return {"steps": int(params["steps"]), "pair": 2, "kept": int(params["kept"]), "code_bytes": code_bytes}


def rows_of(tensors: Mapping[str, Tensor], groups: int, n: int) -> tuple[int, dict[str, Tensor]]:
    """Put the tensors of the layout ``chunks`` in the order of the rows: the number of steps, and the tensors.

    Raises:
        FormatError: the scales have 32 bits, or a row more groups than a column can tell.
    """
    scale = tensors["scale"]
    if scale.dtype == torch.float32 or groups > MOST_GROUPS:
        raise FormatError(
            f"layout rows is for 16-bit weights of up to {MOST_GROUPS} groups a row, got {scale.dtype}, {groups}"
        )
    places = pack.places_of(tensors["masks"], n, groups)
    stored = places >= 0
    order, columns = places[stored], stored.nonzero()[:, 1]
    steps, begins = _steps_of(stored.sum(1))
    heads = columns << 16 | scale[order].view(torch.int16).to(torch.int64) & 0xFFFF
    return len(steps) - 1, {
        "steps": steps,
        "begins": begins,
        "codes": tensors["codes"][order],
        "heads": heads.to(torch.int32),
        "zero": tensors["zero"][order],
    }


def chunks_of(packed: Packed) -> dict[str, Tensor]:
    """Undo `rows_of`."""
    n, k = packed.shape
    rows, columns, scale = _split(packed.tensors, packed.dtype)
    places = rows.new_full((n, -(-k // pack.size_of(packed.pattern))), -1)
    places[rows, columns.to(torch.int64)] = torch.arange(len(rows), device=rows.device)
    order, tensors = pack.in_chunks(places)
    return {
        **tensors,
        "codes": packed.tensors["codes"][order],
        "scale": scale[order],
        "zero": packed.tensors["zero"][order],
    }


def _steps_of(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Cut rows of ``lengths`` [N] groups into steps: [steps + 1, 2] row and groups before, and [N + 1] first steps."""
    of_row = (-(-lengths // STEP)).clamp_min(1)  # a row without groups has a step, too: its output is written there
    begins = F.pad(of_row.cumsum(0), (1, 0))
    before = F.pad(lengths.cumsum(0), (1, 0))
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(of_row)
    firsts = before[rows] + STEP * (torch.arange(len(rows), device=lengths.device) - begins[rows])
    end = torch.stack([torch.full_like(before[-1], len(lengths)), before[-1]])
    return torch.cat([torch.stack([rows, firsts], 1), end[None]]).to(torch.int32), begins.to(torch.int32)


def _split(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Give each group's row and column, and its scale."""
    heads, steps = tensors["heads"], tensors["steps"].to(torch.int64)
    rows = steps[:-1, 0].repeat_interleave(steps[1:, 1] - steps[:-1, 1])
    return rows, heads >> 16 & 0xFFFF, (heads & 0xFFFF).to(torch.int16).view(dtype)


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    (n, k), size = packed.shape, pack.size_of(packed.pattern)
    rows, columns, scale = _split(packed.tensors, packed.dtype)
    values = pack.values_of(packed, scale)
    dense = values.new_zeros(n, -(-k // size), size)
    dense[rows, columns.to(torch.int64)] = values
    return dense.flatten(1)[:, :k].contiguous()


def check_content(packed: Packed) -> None:
    """Check the steps against the rows' lengths, that columns rise inside the weight, and the scales.

    Raises:
        FormatError: names the tensor and the place.
    """
    (n, k), kept = packed.shape, int(packed.params["kept"])
    steps = packed.tensors["steps"].to(torch.int64)
    rows, counted = steps[:-1, 0], steps[1:, 1] - steps[:-1, 1]
    if ((rows < 0) | (rows >= n) | (counted < 0)).any() or steps[0, 1] != 0 or steps[-1, 1] != kept:
        raise FormatError(f"tensor steps leaves the {n} rows or the {kept} groups")
    lengths = torch.zeros(n, dtype=torch.int64, device=rows.device).index_add_(0, rows, counted)
    wanted, begins = _steps_of(lengths)
    if wanted.shape != steps.shape or not torch.equal(wanted.to(torch.int64), steps):
        raise FormatError(f"tensor steps does not cut each row into steps of {STEP} groups")
    if not torch.equal(begins, packed.tensors["begins"]):
        raise FormatError("tensor begins does not tell the first step of each row")
    of_group, columns, scale = _split(packed.tensors, packed.dtype)
    groups = -(-k // pack.size_of(packed.pattern))
    keys = of_group * MOST_GROUPS + columns
    wrong = (columns >= groups) | F.pad(keys[1:] <= keys[:-1], (1, 0))[: len(keys)]
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise FormatError(f"tensor heads, at group {place}: column {columns[place]} does not rise in {groups} groups")
    pack.check_scale(scale)
