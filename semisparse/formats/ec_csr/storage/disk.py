"""The two layouts on disk: what is stored, packing and unpacking; row panels by default, the paper's on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, Scalar, TensorSpec, WeightSpec
from semisparse.formats.ec_csr.paper import disk as paper
from semisparse.formats.ec_csr.paper.extract import Progress
from semisparse.formats.ec_csr.storage import panels, tiles
from semisparse.formats.ec_csr.storage.deltas import (
    BOTH,
    DELTA_BITS,
    GPU,
    LANES,
    LAYOUTS,
    LISTS,
    PANELS,
    TILES,
    has_lists,
    has_tiles,
    layout_of,
    refuse_columns,
)
from semisparse.patterns import Pattern

MAX_WEIGHTS = 1 << 30
"""Maximum number of non-zeros: half of what signed 32-bit offsets can address. The other half is for padding."""


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return tuple(stored for layout in _layouts(spec.params) for stored in layout.specs(spec))


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors.

    Raises:
        ValueError: the params are those of another shape.
        FormatError: K is too large, or a param has a value that the format does not know.
    """
    n, k = spec.shape
    if (spec.params["n"], spec.params["k"]) != (n, k):
        raise ValueError(f"the weight was packed with N, K = {spec.params['n']!r}, {spec.params['k']!r}")
    refuse_columns(k)
    return {name: size for layout in _layouts(spec.params) for name, size in layout.counts(spec).items()}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns at whose multiples weights stack: whole panels; in the paper's layout, nothing."""
    n, k = spec.shape
    return (panels.panel_rows_of(spec.params) if layout_of(spec.params) == PANELS else n), k


def pack_weight(
    weight: Tensor,
    pattern: Pattern,
    *,
    layout: str = PANELS,
    delta_bits: int | str = "auto",
    on_gpu: str = BOTH,
    granularity: int = 8,
    multiple: int = 128,
    clip: int = 0,
    progress: Progress = lambda done, total: None,
) -> tuple[Mapping[str, Scalar], dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K]) as delta-coded lists of columns; -0.0 counts as zero.

    Args:
        weight: [N, K].
        pattern: what it obeys.
        layout: ``banks`` for row panels, or ``paper``, which alone has the options after ``on_gpu``.
        delta_bits: 4, 8, or ``auto`` for the one that takes fewer bytes.
        on_gpu: what a weight of 16 bits has on a Hopper GPU: ``lists``, row panels, which are fastest for 1 and 2
            tokens; ``tiles``, mask tiles, for more; or ``both``. README.md has the figures and the bytes.
        granularity: maximum rows per block; 1 extracts nothing.
        multiple: the number of columns of a block of two rows or more is a multiple of this.
        clip: maximum loads, of 4 columns each, per lane of a block; 0 for twice the mean. Blocks with more are cut.
        progress: called with (weights extracted, all weights) during the extraction.
    Raises:
        FormatError: an option is unknown, or the weight is too large for 32-bit offsets.
    """
    widths = DELTA_BITS if delta_bits == "auto" else (delta_bits,)
    _check_option("layout", layout, LAYOUTS)
    _check_option("delta_bits", widths[0], DELTA_BITS)
    _check_option("on_gpu", on_gpu, (BOTH, LISTS, TILES))
    if on_gpu == TILES and (layout != PANELS or weight.dtype not in tiles.DTYPES):
        raise FormatError(f"format ec_csr: on_gpu={on_gpu} takes row panels of 16 bits, got {layout} of {weight.dtype}")
    _check_option("granularity", granularity, paper.GRANULARITIES)
    if multiple < 1 or multiple % LANES or clip < 0:
        raise FormatError(
            f"format ec_csr: multiple is {multiple} and clip {clip}, expected a multiple of {LANES} and 0 or more"
        )
    refuse_columns(weight.shape[1])
    if int(weight.count_nonzero()) >= MAX_WEIGHTS:
        raise FormatError(f"format ec_csr: {list(weight.shape)} holds more weights than 32-bit offsets reach")
    if layout == PANELS:
        packed = [panels.pack(weight, int(bits)) for bits in widths]
    else:
        packed = paper.pack(weight, [int(bits) for bits in widths], granularity, multiple, clip, progress)
    params, tensors = min(packed, key=lambda one: sum(t.numel() * t.element_size() for t in one[1].values()))
    return ({**params, GPU: on_gpu} if on_gpu != BOTH else params), tensors


def _check_option(name: str, given: object, known: tuple[Any, ...]) -> None:
    if given not in known:
        raise FormatError(f"format ec_csr: {name} is {given!r}, expected {' or '.join(map(str, known))}")


def unpack(packed: Packed) -> Tensor:
    """Return the weight, [N, K] in its dtype."""
    if has_tiles(packed.params):
        return tiles.unpack(packed)
    weight = torch.zeros(packed.shape, dtype=packed.dtype, device=packed.tensors["values"].device)
    flat = weight.view(-1)
    for positions, values in stored_weights(packed):
        flat[positions] = values
    return weight


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the stored weights that are not zero, some at a time: row * K + column, and value."""
    return (panels if has_lists(packed.params) else paper).stored_weights(packed)


def _layouts(params: Params) -> tuple[Any, ...]:
    return {PANELS: (panels,), TILES: (tiles,), BOTH: (panels, tiles)}.get(layout_of(params), (paper,))
