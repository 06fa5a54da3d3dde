"""From bundles to tensors: where each delta, value and partial sum stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.ec_csr.layout import LANES, NO_SLOT, sizes_of
from semisparse.formats.ec_csr.walk import Bundles


def assemble(sets: list[Bundles], panels: Tensor, owners: int) -> dict[str, Tensor]:
    """Write the bundles of some panels, coarse ones first, long ones first.

    Args:
        sets: at most one for each granularity and vector.
        panels: [panels, rows, K], the weights.
        owners: of a bundle's rows: 32 lanes, or 1 if they share them.
    Returns:
        The stored tensors in wide dtypes, a delta a byte, the bundles without offsets; ``row_slots`` holds
        counts, ``panels`` the panel of each bundle.
    Raises:
        FormatError: a panel needs more slots than 16 bits can number.
    """
    device, (count, panel_rows, _) = panels.device, panels.shape
    table = torch.cat([torch.zeros(0, 4, dtype=torch.int64, device=device), *map(_fields, sets)])
    panel, granularity, vector, columns = table.T
    order = _sorted(panel, -granularity, -vector, -columns)
    place = _inverse(order)
    panel, granularity, vector, columns = table[order].T
    table = torch.stack((granularity, vector, columns), 1)
    sizes = sizes_of(table, owners)
    starts = sizes.cumsum(0) - sizes
    deltas, values, entries = (int(size) for size in sizes.sum(0))
    made = _Tensors(
        deltas=torch.zeros(deltas, dtype=torch.uint8, device=device),
        values=torch.zeros(values, dtype=panels.dtype, device=device),
        bases=torch.zeros(len(order), LANES, dtype=torch.int64, device=device),
        rows=torch.full((entries,), -1, device=device),
    )
    begin = 0
    for found in sets:
        at = place[begin : begin + len(found.panel)]
        made.write(found, panels, at, starts[at])
        begin += len(found.panel)
    slots, row_counts = _slots(made.rows, panel.repeat_interleave(sizes[:, 2]), count, panel_rows, owners)
    return {
        "values": made.values,
        "deltas": made.deltas,
        "bases": made.bases,
        "bundles": table,
        "slots": slots,
        "row_slots": row_counts,
        "panels": panel,
    }


@dataclass(frozen=True)
class _Tensors:
    """What is written into: all deltas, values, base columns, and the row of each partial sum, -1 for none."""

    deltas: Tensor
    values: Tensor
    bases: Tensor
    rows: Tensor

    def write(self, found: Bundles, panels: Tensor, at: Tensor, starts: Tensor) -> None:
        """Put the steps of one granularity where they belong.

        Args:
            at: [bundles], the place of each.
            starts: [bundles, 3], its first delta, value and slot.
        """
        vector, granularity = found.vector, found.granularity
        first_delta, first_value, first_slot = starts.T
        inside = (found.step // vector * LANES + found.lane) * vector + found.step % vector
        is_first = found.step == 0
        gaps = found.column.diff(prepend=found.column[:1])
        self.deltas[first_delta[found.bundle] + inside] = torch.where(is_first, 0, gaps).to(torch.uint8)
        self.bases[at[found.bundle[is_first]], found.lane[is_first]] = found.column[is_first]
        owners = found.rows.shape[1]
        rows = found.rows[found.bundle, found.lane % owners]
        read = panels[found.panel[found.bundle, None], rows, found.column[:, None]]
        member = torch.arange(granularity, device=at.device)
        self.values[(first_value[found.bundle] + inside * granularity)[:, None] + member] = torch.where(
            found.real[:, None], read, 0
        )
        entry = torch.arange(owners * granularity, device=at.device)
        self.rows[first_slot[:, None] + entry] = found.rows.flatten(1)


def _fields(found: Bundles) -> Tensor:
    same = torch.ones_like(found.panel)
    return torch.stack((found.panel, found.granularity * same, found.vector * same, found.columns), 1)


def _slots(rows: Tensor, panel: Tensor, panels: int, panel_rows: int, owners: int) -> tuple[Tensor, Tensor]:
    """Number the partial sums of each panel by row, those of a row in their order; and count those of each row."""
    present = (rows >= 0).nonzero().squeeze(1)
    row = panel[present] * panel_rows + rows[present]
    slots = torch.full_like(rows, NO_SLOT)
    slots[present] = _inverse(row.sort(stable=True).indices)
    counts = row.bincount(minlength=panels * panel_rows)
    of_panel = counts.view(panels, panel_rows).sum(1)
    if owners > 1 and panels and int(of_panel.max()) > NO_SLOT:
        raise FormatError(
            f"format ec_csr: 32 rows are cut into {int(of_panel.max())} parts, at most {NO_SLOT} are possible; "
            "set a larger clip, or granularity=1"
        )
    slots[present] -= (of_panel.cumsum(0) - of_panel)[panel[present]]
    return slots, counts


def _sorted(*keys: Tensor) -> Tensor:
    """Give the order by the first key, then the second, and so on; equals keep theirs."""
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].sort(stable=True).indices]
    return order


def _inverse(order: Tensor) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place
