"""Plots of the CSV of `bench kernels`: speed-up over dense by M, the roofline, and bits per weight by sparsity."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from semisparse.bench.kernels import Measurement, fastest_kernels
from semisparse.bench.pyplot import load_pyplot
from semisparse.bench.roofline import candidates, problem_for
from semisparse.errors import FormatError
from semisparse.patterns import NO_ZEROS, parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATTERNS = ("6:8", "5:8", "4:8", "3:8", "2:8", "32:64", "20:64", "30%", "50%", "70%", "90%")
"""The patterns in the plot of bits per weight. Each format has those that it can store."""

STORED = (1024, 4096)
"""N and K of the weight whose bits per weight are plotted."""

COLUMNS = 3


def plot_all(measurements: list[Measurement], folder: Path) -> list[Path]:
    """Draw every plot as PNG.

    Args:
        measurements: the CSV's rows, of one machine.
        folder: the folder for the files.
    Returns:
        The files' paths.
    Raises:
        SemisparseError: matplotlib is not installed.
    """
    fastest = fastest_kernels(measurements)
    machine = f"{fastest[0].machine}, {fastest[0].dtype}, the fastest kernel of each format"
    shapes = list(dict.fromkeys((row.n, row.k) for row in fastest))

    def speedups(axes: list[Axes]) -> None:
        for cell, (n, k) in zip(axes, shapes, strict=False):
            _speedup(cell, [row for row in fastest if (row.n, row.k) == (n, k)])

    return [
        _draw(folder / "speedup.png", f"Speed-up over dense, {machine}", len(shapes), speedups),
        _draw(folder / "roofline.png", f"Roofline, {machine}", 1, lambda axes: _roofline(axes[0], fastest)),
        _draw(folder / "storage.png", "Bits per weight, packed from 16-bit weights", 1, lambda axes: _storage(axes[0])),
    ]


def _draw(path: Path, title: str, cells: int, fill: Callable[[list[Axes]], None]) -> Path:
    pyplot = load_pyplot()
    width = min(cells, COLUMNS)
    height = -(-cells // width)
    figure, grid = pyplot.subplots(
        height, width, figsize=(max(8.0, 5.5 * width), max(5.0, 4 * height)), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    fill(axes)
    for unused in axes[cells:]:
        unused.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _speedup(axes: Axes, measurements: list[Measurement]) -> None:
    series: dict[str, list[Measurement]] = {}
    for row in measurements:
        if not row.candidate.is_baseline:
            series.setdefault(row.candidate.label, []).append(row)
    for label, points in series.items():
        points.sort(key=lambda row: row.m)
        axes.plot([p.m for p in points], [p.speedup for p in points], marker="o", markersize=3, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.set_title(f"N, K = {measurements[0].n:,}, {measurements[0].k:,}", fontsize=10)
    axes.set_xlabel("tokens M")
    axes.set_ylabel("speed-up over dense")


def _roofline(axes: Axes, measurements: list[Measurement]) -> None:
    bandwidth, peak = measurements[0].read_bandwidth, measurements[0].peak_fp16
    intensities = [row.operations / row.bytes for row in measurements]
    ends = [min(intensities), peak / bandwidth, max(*intensities, peak / bandwidth)]
    axes.plot(ends, [min(peak, bandwidth * end) / 1e12 for end in ends], color="black", linewidth=1)
    axes.annotate(
        f"{bandwidth / 1e12:.2f} TB/s read, {peak / 1e12:,.0f} TFLOP/s 16-bit", (0.03, 0.95), xycoords="axes fraction"
    )
    series: dict[str, list[Measurement]] = {}
    for row in measurements:
        series.setdefault(row.candidate.label, []).append(row)
    for label, points in series.items():
        x = [p.operations / p.bytes for p in points]
        y = [p.operations / p.us / 1e6 for p in points]
        axes.scatter(x, y, s=12, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("T(FL)OP/s (the roof of 8-bit units is twice as high)")


def _storage(axes: Axes) -> None:
    """Plot bits per weight of every format at the patterns that it can store, including those of its recipes."""
    series: dict[str, set[tuple[float, float]]] = {}
    for candidate in candidates() + candidates(patterns=PATTERNS):
        try:
            _, stored = problem_for(candidate, 1, *STORED, torch.bfloat16, "cpu")
        except FormatError:
            continue
        name = " ".join([candidate.format, *(str(value) for value in candidate.options.values())])
        zeros = 0.0 if candidate.pattern == NO_ZEROS else 1 - parse_pattern(candidate.pattern).density
        series.setdefault(name, set()).add((100 * zeros, 8 * stored / (STORED[0] * STORED[1])))
    constant: dict[float, list[str]] = {}  # bits per weight of formats with one point
    for name, points in series.items():
        if len(points) > 1:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
        else:
            constant.setdefault(round(next(iter(points))[1], 1), []).append(name)
    for (bits, names), style in zip(constant.items(), cycle(("-", "--", ":", "-.")), strict=False):
        axes.axhline(bits, color="grey", linewidth=1, linestyle=style, label=", ".join(names))
    axes.set_xlabel("zeros, %")
    axes.set_ylabel("bits per weight, with metadata and padding")
    axes.set_ylim(bottom=0)
