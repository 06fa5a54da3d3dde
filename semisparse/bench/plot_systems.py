"""Plots of the CSV files of `bench model` and `bench parallel`, and of the benchmarks of one format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from semisparse.bench.pyplot import draw, numbered_style, style_of
from semisparse.formats.base import format_names
from semisparse.patterns import parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, str]

MODEL_AXES = (("first_token_ms", "first token, ms"), ("decode_ms", "ms per decode step"), ("weight_gb", "weights, GB"))


def plot_models(rows: Sequence[Row], path: Path) -> Path:
    """Draw time to first token, time per decode step and size of each model as bars."""

    def fill(axes: list[Axes]) -> None:
        for cell, (column, label) in zip(axes, MODEL_AXES, strict=False):
            for number, row in enumerate(rows):
                form = row["weights"].split()[0]
                colour = style_of(form)["color"] if form in format_names() else "grey"
                cell.barh(number, float(row[column]), color=colour)
                cell.text(float(row[column]), number, f" {float(row[column]):.3g}", va="center", fontsize=8)
            cell.set_yticks(range(len(rows)), [row["weights"] for row in rows])
            cell.invert_yaxis()
            cell.margins(x=0.15)
            cell.set_xlabel(label)

    first = rows[0]
    title = f"{first['model']}, batch {first['batch']}, prompt {first['prompt']}, {first['machine']}"
    return draw(path, title, len(MODEL_AXES), fill)


def plot_ways(rows: Sequence[Row], path: Path) -> Path:
    """Draw the microseconds of each ``way`` by shape as bars: the CSVs of ``ec_csr`` and of decode in ``gqs``."""
    panels = _grouped(rows, lambda row: (row.get("what", "decode"), row["n"], row["k"], row["dtype"]))
    ways = list(dict.fromkeys(row["way"] for row in rows))

    def fill(axes: list[Axes]) -> None:
        for cell, ((what, n, k, dtype), of_panel) in zip(axes, panels.items(), strict=False):
            names = [" ".join(filter(None, (row["way"], _zeros(row)))) for row in of_panel]
            for number, row in enumerate(of_panel):
                cell.barh(number, float(row["us"]), color=numbered_style(ways.index(row["way"]))["color"])
                cell.text(float(row["us"]), number, f" {float(row['us']):.3g}", va="center", fontsize=7)
            cell.set_yticks(range(len(names)), names, fontsize=7)
            cell.invert_yaxis()
            cell.margins(x=0.2)
            cell.set_title(f"{what}, {n} x {k}, {dtype}", fontsize=9)
            cell.set_xlabel("microseconds")

    return draw(path, rows[0]["machine"], len(panels), fill)


def _zeros(row: Row) -> str:
    return f"{row['zeros']} %" if row.get("zeros") else ""


def plot_vectors(rows: Sequence[Row], path: Path) -> Path:
    """Draw speed-ups over dense by zeros, or by tokens for decode: the CSVs of ``vector_nm``."""
    panels = _grouped(rows, lambda row: (row["what"], row["n"], row["k"], row["dtype"]))

    def fill(axes: list[Axes]) -> None:
        for cell, ((what, n, k, dtype), of_panel) in zip(axes, panels.items(), strict=False):
            series = _grouped(of_panel, partial(_series, what))
            for number, ((label,), points) in enumerate(series.items()):
                best: dict[float, float] = {}
                for row in points:
                    x = float(row["m"]) if what == "decode" else 100 * (1 - parse_pattern(row["pattern"]).density)
                    best[x] = max(best.get(x, 0.0), float(row["speedup"]))
                cell.plot(*zip(*sorted(best.items()), strict=True), label=label, **numbered_style(number))
            cell.axhline(1, color="black", linewidth=0.8)
            cell.set_title(f"{what}, {n} x {k}, {dtype}", fontsize=9)
            cell.set_xlabel("tokens M" if what == "decode" else "zeros, %")
            cell.set_ylabel("speed-up over dense")

    return draw(path, "vector_nm, the fastest kernel of each series", len(panels), fill)


def _series(what: str, row: Row) -> tuple[str]:
    """Return what tells the lines of a panel apart: the kernel, the step of an ablation, or the number of tokens."""
    return ({"decode": row["kernel"], "ablation": row["kernel"].partition(":")[0]}.get(what, f"M = {row['m']}"),)


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
