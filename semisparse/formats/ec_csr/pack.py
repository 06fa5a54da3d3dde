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
    FIRST_OFFSET,
    LAYOUTS,
    PANEL_ROWS,
    SIZES,
    index_bits_for,
    most_slots,
    narrowed,
    vector_of,
)
from semisparse.formats.ec_csr.walk import Bundles, bundles_of_panels, bundles_of_paper
from semisparse.patterns import Pattern
from semisparse.patterns.base import blocks_along

BATCH = 1 << 24
"""Weights whose panels are packed at a time."""

WARPS = 16
"""Of the thread block that computes a panel: by default parts are so long that each has a bundle of one-row blocks."""

FEWEST_LOADS = 4
"""Of a part by default; shorter ones cost more in bases and slots than their balance brings."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How a weight is packed.

    Args:
        layout: ``panels``: a lane has a block of its own, blocks stay inside 32 rows; ``paper``: a warp has a block, of
            any rows.
        delta_bits: 4, 8, or ``auto`` for what takes fewer bytes.
        granularity: the most rows of a block; 1 extracts nothing.
        multiple: columns of a block of two rows or more are a multiple of this.
        clip: the most loads that a lane makes in one block; 0 for the layout's default.
        progress: called with (panels done, all panels).
    """

    layout: str
    delta_bits: int
    granularity: int
    multiple: int
    clip: int
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name, known in (("layout", LAYOUTS), ("delta_bits", DELTA_BITS), ("granularity", GRANULARITIES)):
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
        _packed(weight, Options(layout, width, granularity, multiple, clip, progress))  # type: ignore[arg-type]
        for width in widths
    ]
    return min(made, key=lambda found: sum(t.numel() * t.element_size() for t in found[1].values()))


def _packed(weight: Tensor, options: Options) -> tuple[Params, dict[str, Tensor]]:
    n, k = weight.shape
    if weight.count_nonzero() * 2 >= 1 << 31:
        raise FormatError(f"format ec_csr: {n} x {k} holds more weights than 32-bit offsets reach; split the layer")
    panel_rows = n if options.layout == "paper" else PANEL_ROWS
    panels = blocks_along(weight, panel_rows, dim=0)
    clip = options.clip or _default_clip(weight, options.layout)
    width = max(1, BATCH // panels[0].numel())
    parts = []
    for first in range(0, len(panels), width):
        batch = panels[first : first + width]
        sets = extract(batch != 0, options.multiple, options.granularity)
        bundles = list(_bundles(sets, options, clip, weight.dtype))
        parts.append(assemble(bundles, batch, 1 if options.layout == "paper" else LANES))
        if options.progress:
            options.progress(min(first + width, len(panels)), len(panels))
    return _joined(parts, n, k, options)


def _default_clip(weight: Tensor, layout: str) -> int:
    """Give parts of equal work to each warp of a panel; in the paper's layout, blocks of twice the mean row."""
    mean = int(weight.count_nonzero()) / weight.shape[0]
    if layout == "paper":
        return max(FEWEST_LOADS, -(-int(2 * mean) // (4 * LANES)))
    return max(FEWEST_LOADS, -(-int(mean) // (WARPS * vector_of(1, weight.dtype))))


def _bundles(sets: list[Blocks], options: Options, clip: int, dtype: torch.dtype) -> Iterator[Bundles]:
    for blocks in sets:
        if options.layout == "paper":
            yield from bundles_of_paper(blocks, options.delta_bits, clip)
        else:
            yield from bundles_of_panels(blocks, options.delta_bits, clip, dtype)


def _joined(parts: list[dict[str, Tensor]], n: int, k: int, options: Options) -> tuple[Params, dict[str, Tensor]]:
    """Put the tensors of successive panels one after another, and say how large they became."""
    offsets = torch.zeros(3, dtype=torch.int64, device=parts[0]["bundles"].device)
    for part in parts:
        part["bundles"][:, FIRST_OFFSET:] += offsets
        offsets += torch.tensor([len(part[name]) for name in ("deltas", "values", "slots")], device=offsets.device)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sizes = {name: len(joined[name]) for name in SIZES}
    bits = index_bits_for(k)
    paper = options.layout == "paper"
    deltas = joined["deltas"]
    tensors = {
        "values": joined["values"],
        "deltas": deltas if options.delta_bits == 8 else deltas[::2] | deltas[1::2] << 4,
        "bases": narrowed(joined["bases"], bits),
        "bundles": joined["bundles"].int(),
        "row_slots": _starts(joined["row_slots"][:n]),
        "slots": joined["slots"].int() if paper else narrowed(joined["slots"], 16),
    }
    params: dict[str, int | float | str] = {
        "layout": options.layout,
        "delta_bits": options.delta_bits,
        "k": k,
        **sizes,
    }
    if not paper:
        tensors["panel_bundles"] = _starts(joined["panel_bundles"])
        params["panel_slots"] = most_slots(tensors["row_slots"])
    return params, tensors


def _starts(counts: Tensor) -> Tensor:
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(0)
    return starts
