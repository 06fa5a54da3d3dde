"""pack_panels.cu: row panels from a dense weight on a GPU, where storage/panels.py takes tens of milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisparse.formats.base import Scalar
from semisparse.formats.ec_csr.cuda.schedule import UNSIGNED_TYPES
from semisparse.formats.ec_csr.storage.deltas import INDEX_DTYPES, LANES, index_bits_for
from semisparse.formats.ec_csr.storage.panels import SEGMENTS, lane_columns_of, panel_params, rows_of_panels, vector_of
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines


def pack_defines(itemsize: int, delta_bits: int, index_bits: int) -> Defines:
    """Return the macros."""
    return {"SCALAR": UNSIGNED_TYPES[itemsize], "DELTA_BITS": delta_bits, "INDEX": UNSIGNED_TYPES[index_bits // 8]}


SOURCE = CudaSource(
    Path(__file__).with_name("pack_panels.cu"), (pack_defines(2, 4, 16), pack_defines(2, 8, 32), pack_defines(4, 8, 16))
)


def refusal(weight: Tensor) -> str | None:
    """Say why the kernel cannot pack ``weight``, or None if it can."""
    if weight.stride(1) != 1 or weight.stride(0) != lane_columns_of(weight.shape[1]) * LANES:
        return "reads whole lanes: rows must be padded with zeros to a multiple of 32 columns"
    return cuda_refusal(weight.device)


def pack(
    weight: Tensor, delta_bits: int, panel_rows: int, paired: bool
) -> tuple[Mapping[str, Scalar], dict[str, Tensor]]:
    """Return what `storage.panels.pack` returns for a weight's rows in the order of (paired) panels.

    Args:
        weight: [N, K], not refused.
        delta_bits: 4 or 8.
        panel_rows: rows per panel.
        paired: as in `storage.panels.is_paired`.
    """
    (n, k), device, vector = weight.shape, weight.device, vector_of(weight.dtype)
    rows = rows_of_panels(n, panel_rows, paired, device).to(torch.int32)
    panels, columns, index_bits = len(rows) // panel_rows, lane_columns_of(k), index_bits_for(k)
    defines = pack_defines(weight.dtype.itemsize, delta_bits, index_bits)
    kernel = SOURCE.build("semisparse_ec_csr_pack_panels", defines).load(device)
    sizes: dict[str, Any] = {"n": n, "pitch": weight.stride(0), "panel_rows": panel_rows, "lane_columns": columns}
    sizes |= {"weight": weight, "rows": rows, "limit": min((1 << delta_bits) - 1, columns)}
    loads = torch.empty(panels, dtype=torch.int32, device=device)
    none: dict[str, Any] = {"values": None, "deltas": None, "bases": None}
    kernel((panels, 1, 1), LANES, panel_loads=None, loads=loads, spans=None, **none, **sizes)
    panel_loads = torch.zeros(panels + 1, dtype=torch.int32, device=device)
    panel_loads[1:] = loads.cumsum(0)
    total = int(panel_loads[-1]) * LANES * vector
    tensors: dict[str, Any] = {
        "values": torch.zeros(total, dtype=weight.dtype, device=device),
        "deltas": torch.zeros(total * delta_bits // 8, dtype=torch.uint8, device=device),
        "bases": torch.zeros(panels * SEGMENTS, LANES, dtype=INDEX_DTYPES[index_bits], device=device),
    }
    kernel((panels, 1, 1), LANES, panel_loads=panel_loads, loads=loads, spans=loads, **tensors, **sizes)
    return panel_params(n, k, delta_bits, panel_rows, total, int(loads.max())), {**tensors, "panel_loads": panel_loads}
