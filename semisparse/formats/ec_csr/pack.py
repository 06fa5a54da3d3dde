"""Weights to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Params
from semisparse.formats.ec_csr.assemble import assemble
from semisparse.formats.ec_csr.extract import Blocks, extract
from semisparse.formats.ec_csr.layout import (
    DELTA_BITS,
    GRANULARITIES,
    LANES,
    PANEL_ROWS,
    SIZES,
    index_bits_for,
    layout_of,
    most_slots,
    narrowed,
    panel_rows_of,
    sizes_of,
    vector_of,
)
from semisparse.formats.ec_csr.walk import LONG_VECTOR, Bundles, bundles_of_panels, bundles_of_paper
from semisparse.patterns import Pattern
from semisparse.patterns.base import blocks_along

BATCH = 1 << 24
"""Weights whose panels are packed at a time."""

WARPS = 16
"""Of the thread block that computes a panel: by default parts are so long that each has a bundle of one-row blocks."""

SPARE_LANES = 7
"""Parts by which a panel aims below its warps' lanes: rounding 32 rows' parts seldom adds more (1.6 times 4)."""

FEWEST_LOADS = 4
"""Of a part by default; shorter ones cost more in bases and slots than their balance brings."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How a weight is packed.

    Args:
        dtype: of the weight.
        layout: ``panels``: a lane has a block of its own, blocks stay inside 32 rows; ``paper``: a warp has a block, of
            any rows.
        delta_bits: 4, 8, or ``auto`` for what takes fewer bytes.
        granularity: the most rows of a block; 1 extracts nothing.
        multiple: columns of a block of two rows or more are a multiple of this.
        clip: the loads of a lane that long blocks are cut to: about so many in ``panels``, at most so many in
            ``paper``; 0 for equal work to every warp, or for twice the mean.
        progress: called with (panels done, all panels).
    """

    dtype: torch.dtype
    layout: str
    delta_bits: int
    granularity: int
    multiple: int
    clip: int
    progress: Progress | None = None

    def __post_init__(self) -> None:
        layout_of({"layout": self.layout})
        for name, known in (("delta_bits", DELTA_BITS), ("granularity", GRANULARITIES[self.layout])):
            if getattr(self, name) not in known:
                choice = " or ".join(map(str, known))
                raise FormatError(f"format ec_csr: {name} is {getattr(self, name)!r}, expected {choice}")
        smallest = vector_of(1, torch.float16) if self.layout == "panels" else LANES
        if self.multiple < 1 or self.multiple % smallest:
            raise FormatError(
                f"format ec_csr: multiple is {self.multiple}, expected a multiple of {smallest} in layout {self.layout}"
            )
        if self.clip < 0:
            raise FormatError(f"format ec_csr: clip is {self.clip}, expected a number of loads, or 0 for the default")


def pack_weight(
    weight: Tensor,
    pattern: Pattern,
    *,
    layout: str = "panels",
    delta_bits: int | str = "auto",
    granularity: int | None = None,
    multiple: int | None = None,
    clip: int = 0,
    progress: Progress | None = None,
) -> tuple[Params, dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K]) as delta-coded blocks; -0.0 counts as zero.

    Args:
        weight: [N, K].
        pattern: what it obeys; any will do.
        layout, delta_bits, granularity, multiple, clip, progress: see `Options`. By default `panels` extracts nothing,
            because one-row blocks are smaller and as fast, and `paper` does what the paper does (8 rows, multiple 128).
    Raises:
        FormatError: an option is unknown, or the weight is too large for 32-bit offsets.
    """
    paper = layout == "paper"
    granularity = granularity or (8 if paper else 1)
    multiple = multiple or (4 * LANES if paper else LANES)
    widths = DELTA_BITS if delta_bits == "auto" else (delta_bits,)
    made = [
        _packed(weight, Options(weight.dtype, layout, width, granularity, multiple, clip, progress))  # type: ignore[arg-type]
        for width in widths
    ]
    return min(made, key=lambda found: sum(t.numel() * t.element_size() for t in found[1].values()))


def _packed(weight: Tensor, options: Options) -> tuple[Params, dict[str, Tensor]]:
    n, k = weight.shape
    if weight.count_nonzero() * 2 >= 1 << 31:
        raise FormatError(f"format ec_csr: {n} x {k} holds more weights than 32-bit offsets reach; split the layer")
    panel_rows = n if options.layout == "paper" else PANEL_ROWS
    panels = blocks_along(weight, panel_rows, dim=0)
    width = max(1, BATCH // panels[0].numel())
    parts = []
    for first in range(0, len(panels), width):
        batch = panels[first : first + width]
        sets = extract(batch != 0, options.multiple, options.granularity)
        made = assemble(list(_bundles(sets, options, len(batch))), batch, 1 if options.layout == "paper" else LANES)
        made["panels"] += first
        parts.append(made)
        if options.progress:
            options.progress(min(first + width, len(panels)), len(panels))
    return _joined(parts, n, k, options)


def _bundles(sets: list[Blocks], options: Options, panels: int) -> Iterator[Bundles]:
    if options.layout == "paper":
        longest = options.clip or _paper_clip(sets)
        for blocks in sets:
            yield from bundles_of_paper(blocks, options.delta_bits, longest)
        return
    clip = torch.full((panels,), float(options.clip)) if options.clip else _even_clip(sets, options.dtype, panels)
    for blocks in sets:
        yield from bundles_of_panels(blocks, options.delta_bits, clip.to(blocks.panels.device), options.dtype)


def _even_clip(sets: list[Blocks], dtype: torch.dtype, panels: int) -> Tensor:
    """Give, for each panel, the loads of a part that make a bundle for each warp of its thread block, [panels]."""
    loads = torch.zeros(panels, dtype=torch.int64, device=sets[0].panels.device)
    for blocks in sets:
        vector = vector_of(blocks.granularity, dtype)
        loads.index_add_(0, blocks.panels, -(-blocks.columns.sum(1) // vector))
    return (loads / (LANES * WARPS - SPARE_LANES)).clamp(min=FEWEST_LOADS)


def _paper_clip(sets: list[Blocks]) -> int:
    """Give twice the mean block's loads a lane."""
    blocks = sum(len(found.panels) for found in sets)
    columns = sum(int(found.columns.sum()) for found in sets)
    return max(FEWEST_LOADS, -(-2 * columns // (max(1, blocks) * LANES * LONG_VECTOR)))


def _joined(parts: list[dict[str, Tensor]], n: int, k: int, options: Options) -> tuple[Params, dict[str, Tensor]]:
    """Put the tensors of successive panels one after another, and say how large they became."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    params: dict[str, int | float | str] = {
        "layout": options.layout,
        "delta_bits": options.delta_bits,
        "granularity": max([1, *joined["bundles"][:, 0].tolist()]),
        "k": k,
        **{name: len(joined[name]) for name in SIZES},
    }
    panels = -(-n // panel_rows_of(n, params))
    params["panel_bundles"] = int(joined["panels"].bincount(minlength=panels).max())
    table, bases = _padded(joined["bundles"], joined["bases"], joined["panels"], panels, options)
    deltas = joined["deltas"]
    row_slots = torch.zeros(n + 1, dtype=torch.int32, device=deltas.device)
    row_slots[1:] = joined["row_slots"][:n].cumsum(0)
    if options.layout == "panels":
        params["panel_slots"] = most_slots(row_slots)
    return params, {
        "values": joined["values"],
        "deltas": deltas if options.delta_bits == 8 else deltas[::2] | deltas[1::2] << 4,
        "bases": narrowed(bases, index_bits_for(k)),
        "bundles": table.int(),
        "row_slots": row_slots,
        "slots": joined["slots"].int() if options.layout == "paper" else narrowed(joined["slots"], 16),
    }


def _padded(table: Tensor, bases: Tensor, panel: Tensor, panels: int, options: Options) -> tuple[Tensor, Tensor]:
    """Give every panel as many bundles, the last ones empty, so that a warp finds its own without a search.

    Args:
        table: [bundles, 3], granularity, vector and columns.
        bases: [bundles, 32].
        panel: [bundles], ascending.
    Returns:
        The table with the offsets that follow from it, [panels * most, 6], and the bases in the same order.
    """
    counts = panel.bincount(minlength=panels)
    most = int(counts.max())
    place = panel * most + torch.arange(len(panel), device=panel.device) - (counts.cumsum(0) - counts)[panel]
    empty = table.new_tensor([1, vector_of(1, options.dtype) if options.layout == "panels" else 1, 0])
    padded = empty.repeat(panels * most, 1)
    padded[place] = table
    padded_bases = bases.new_zeros(panels * most, LANES)
    padded_bases[place] = bases
    sizes = sizes_of(padded, 1 if options.layout == "paper" else LANES)
    return torch.cat((padded, sizes.cumsum(0) - sizes), 1), padded_bases
