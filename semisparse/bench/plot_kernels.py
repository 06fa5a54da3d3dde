"""Plots of the CSV of `bench kernels`: speed-up over dense by M, the roofline, and bits per weight by sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from semisparse.bench.kernels import Measurement, fastest_kernels
from semisparse.bench.pyplot import draw, style_of
from semisparse.bench.roofline import candidates, problem_for
from semisparse.errors import FormatError
from semisparse.patterns import NO_ZEROS, parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATTERNS = ("6:8", "5:8", "4:8", "3:8", "2:8", "32:64", "20:64", "30%", "50%", "70%", "90%")
"""The patterns in the plot of bits per weight. Each format has those that it can store."""

STORED = (1024, 4096)
"""N and K of the weight whose bits per weight are plotted."""


def plot_kernels(measurements: list[Measurement], folder: Path) -> list[Path]:
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
        draw(folder / "speedup.png", f"Speed-up over dense, {machine}", len(shapes), speedups),
        draw(folder / "roofline.png", f"Roofline, {machine}", 1, lambda axes: _roofline(axes[0], fastest)),
        draw(folder / "storage.png", "Bits per weight, packed from 16-bit weights", 1, lambda axes: _storage(axes[0])),
    ]


def _speedup(axes: Axes, measurements: list[Measurement]) -> None:
    series: dict[str, list[Measurement]] = {}
    for row in measurements:
        if not row.candidate.is_baseline:
            series.setdefault(row.candidate.label, []).append(row)
    for label, points in series.items():
        points.sort(key=lambda row: row.m)
        style = style_of(points[0].format, _variant(label, list(series)))
        axes.plot([p.m for p in points], [p.speedup for p in points], markersize=5, label=label, **style)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.set_title(f"N, K = {measurements[0].n:,}, {measurements[0].k:,}", fontsize=10)
    axes.set_xlabel("tokens M")
    axes.set_ylabel("speed-up over dense")


def _roofline(axes: Axes, measurements: list[Measurement]) -> None:
    bandwidth, peak = measurements[0].read_bandwidth, roof(measurements)
    intensities = [row.operations / row.bytes for row in measurements]
    ridge = max(intensities) if peak is None else peak / bandwidth
    ends = sorted({min(intensities), ridge, max(*intensities, ridge)})
    heights = [bandwidth * end if peak is None else min(peak, bandwidth * end) for end in ends]
    axes.plot(ends, [height / 1e12 for height in heights], color="black", linewidth=1)
    dtype = measurements[0].dtype
    flat = "no peak is known" if peak is None else f"{peak / 1e12:,.0f} TFLOP/s"
    axes.annotate(f"{bandwidth / 1e12:.2f} TB/s read, {dtype} {flat}", (0.03, 0.95), xycoords="axes fraction")
    series: dict[str, list[Measurement]] = {}
    for row in measurements:
        series.setdefault(row.candidate.label, []).append(row)
    for label, points in series.items():
        x = [p.operations / p.bytes for p in points]
        y = [p.operations / p.us / 1e6 for p in points]
        style = style_of(points[0].format, _variant(label, list(series)))
        axes.plot(x, y, markersize=4, label=label, **{**style, "linestyle": "none"})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("T(FL)OP/s" if dtype == "float32" else "T(FL)OP/s (the roof of 8-bit units is twice as high)")


def roof(measurements: list[Measurement]) -> float | None:
    """Return the peak in operations per second of the dense matmul in the measured dtype; None if unknown.

    It follows from the floor of a dense row that is bound by arithmetic: one whose floor is above the time of reading
    its bytes. Without such a row it is the CSV's ``peak_fp16``, which holds for 16-bit dtypes only.
    """
    dense = [row for row in measurements if row.candidate.is_baseline]
    bound = [row for row in dense if row.floor_us > 1.01e6 * row.bytes / row.read_bandwidth]
    peaks = [1e6 * row.operations / row.floor_us for row in bound]
    if peaks:
        return max(peaks)
    return None if measurements[0].dtype == "float32" else measurements[0].peak_fp16


def _variant(label: str, labels: list[str]) -> int:
    """Return the index of a label among the labels of its format."""
    form = label.split()[0]
    return [other for other in labels if other.split()[0] == form].index(label)


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
    for name, points in series.items():
        style = style_of(name.split()[0], _variant(name, list(series)))
        axes.plot(*zip(*sorted(points), strict=True), markersize=5, label=name, **style)
    axes.set_xlabel("zeros, %")
    axes.set_ylabel("bits per weight, with metadata and padding")
    axes.set_ylim(bottom=0)
