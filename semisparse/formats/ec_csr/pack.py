"""Weights to tensors, tensors to weights, and the checks that let kernels follow them: what the layouts share."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.ec_csr import banks, paper
from semisparse.formats.ec_csr.extract import Progress, extract
from semisparse.formats.ec_csr.layout import DELTA_BITS, GRANULARITIES, LANES, LAYOUTS, layout_of
from semisparse.patterns import Pattern

MODULES = {"banks": banks, "paper": paper}

MOST_OFFSET = 1 << 31


def pack_weight(
    weight: Tensor,
    pattern: Pattern,
    *,
    layout: str = "banks",
    delta_bits: int | str = "auto",
    granularity: int = 8,
    multiple: int = 128,
    clip: int = 0,
    progress: Progress = lambda done, total: None,
) -> tuple[Params, dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K]) as delta-coded columns; -0.0 counts as zero.

    Args:
        weight: [N, K].
        pattern: what it obeys.
        layout: ``banks``, or ``paper``, which alone has the options that follow ``delta_bits``.
        delta_bits: 4, 8, or ``auto`` for what takes fewer bytes.
        granularity: the most rows of a block; 1 extracts nothing.
        multiple: columns of a block of two rows or more are a multiple of this.
        clip: the most loads of 4 columns that a lane makes in one block; 0 for twice the mean.
        progress: told of the extraction, which takes long: (weights placed, all weights).
    Raises:
        FormatError: an option is unknown, or the weight is too large for 32-bit offsets.
    """
    widths = DELTA_BITS if delta_bits == "auto" else (delta_bits,)
    for name, given, known in (
        ("layout", layout, LAYOUTS),
        ("delta_bits", widths[0], DELTA_BITS),
        ("granularity", granularity, GRANULARITIES),
    ):
        if given not in known:
            choice = " or ".join(map(str, known))
            raise FormatError(f"format ec_csr: {name} is {given!r}, expected {choice}")
    if multiple < 1 or multiple % LANES or clip < 0:
        raise FormatError(
            f"format ec_csr: multiple is {multiple} and clip {clip}, expected a multiple of {LANES} and 0 or more"
        )
    if 2 * int(weight.count_nonzero()) >= MOST_OFFSET:
        raise FormatError(f"format ec_csr: {list(weight.shape)} holds more weights than 32-bit offsets reach")
    if layout == "banks":
        made = [banks.pack(weight, int(bits)) for bits in widths]
    else:
        sets = extract(weight != 0, multiple, granularity, progress)
        made = [paper.pack(weight, sets, int(bits), clip) for bits in widths]
    return min(made, key=lambda found: sum(t.numel() * t.element_size() for t in found[1].values()))


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    weight = torch.zeros(packed.shape, dtype=packed.dtype, device=packed.tensors["values"].device)
    flat = weight.view(-1)
    for places, values in MODULES[layout_of(packed.params)].stored_weights(packed):
        flat[places] = values
    return weight


def check_content(packed: Packed) -> None:
    """Check every size, offset and step, and that no weight is stored twice.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    MODULES[layout_of(packed.params)].check(packed)
