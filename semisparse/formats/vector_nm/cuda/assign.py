"""Assign the columns of a weight to quads of four, of which no slice of 32 rows keeps more than two (assign.cu)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.runtime.kernel import CudaSource

SOURCE = CudaSource(Path(__file__).with_name("assign.cu"))

THREADS = 256


def assign_columns(columns: Tensor, slices: Tensor) -> tuple[Tensor, Tensor]:
    """Assign columns to quads, one after another.

    Args:
        columns: [row_tiles, width] int32, in the order in which they are placed.
        slices: [row_tiles, width] uint8: for each column, a bit per slice that keeps it; 0 past the last column.
    Returns:
        quads: [row_tiles, width, 4] int32, the columns of each quad; -1 for none.
        counts: [row_tiles] int32, the quads of each row tile.
    """
    row_tiles, width = columns.shape
    quads = torch.full((row_tiles, width, 4), -1, dtype=torch.int32, device=columns.device)
    counts = torch.empty(row_tiles, dtype=torch.int32, device=columns.device)
    kernel = SOURCE.build("semisparse_vector_nm_assign").load(columns.device)
    kernel((row_tiles, 1, 1), THREADS, columns=columns, slices=slices, quads=quads, counts=counts, width=width)
    return quads, counts
