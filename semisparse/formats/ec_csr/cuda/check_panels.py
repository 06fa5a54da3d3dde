"""check_panels.cu: whether lists on a GPU are valid, in a millisecond; torch takes tens of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.pack_panels import pack_defines
from semisparse.formats.ec_csr.storage.deltas import LANES, delta_bits_of, index_bits_for
from semisparse.formats.ec_csr.storage.panels import (
    is_paired,
    lane_columns_of,
    lists_of,
    panel_rows_of,
    rows_of_panels,
)
from semisparse.runtime.kernel import CudaSource, cuda_refusal

SOURCE = CudaSource(
    Path(__file__).with_name("check_panels.cu"),
    (pack_defines(2, 4, 16), pack_defines(2, 8, 32), pack_defines(4, 8, 16)),
)


def span_of(packed: Packed) -> int | None:
    """Return the span of a weight's lists; None if they have a fault, or if no kernel can check them here.

    Args:
        packed: its ``panel_loads`` and ``bases`` have been checked.
    """
    if packed.device.type != "cuda" or cuda_refusal(packed.device) is not None:
        return None
    return _checked(packed)


def _checked(packed: Packed) -> int | None:
    (n, k), params, device = packed.shape, packed.params, packed.device
    defines = pack_defines(packed.dtype.itemsize, delta_bits_of(params), index_bits_for(k))
    kernel = SOURCE.build("semisparse_ec_csr_check_panels", defines).load(device)
    panel_rows = panel_rows_of(params)
    rows = rows_of_panels(n, panel_rows, is_paired(params), device).to(torch.int32)
    results = torch.empty(len(rows) // panel_rows, 2, dtype=torch.int32, device=device)
    lists: dict[str, Any] = {**lists_of(packed), "rows": rows, "results": results}
    sizes: dict[str, Any] = {"n": n, "k": k, "panel_rows": panel_rows, "lane_columns": lane_columns_of(k)}
    kernel((len(results), 1, 1), LANES, **lists, **sizes)
    faults, span = results.amax(0).tolist()
    return None if faults else span
