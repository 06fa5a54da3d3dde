"""matplotlib, which only plots need, and what all plots have in common: colours, markers, a grid of axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisparse.errors import SemisparseError
from semisparse.formats.base import format_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#000000", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

MARKERS = "osD^vPX"
"""One per format, so that points of two formats differ in more than colour."""

LINES = ("-", "--", ":", "-.")
"""One per candidate (pattern and pack options, `roofline.Candidate`) of a format."""

FILLS = ("full", "none", "left", "right", "top", "bottom")
"""One per candidate of a format, for points without a line."""

COLUMNS = 3
"""Maximum number of axes side by side in a picture."""


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, drawing to files.

    Raises:
        SemisparseError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SemisparseError("plots need matplotlib: pip install 'semisparse[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def style_of(form: str, variant: int = 0) -> dict[str, Any]:
    """Return matplotlib keywords: a format's colour and marker, and one of its candidates' line and fill style.

    Args:
        form: the format's name; any other name has the style that follows the last format's.
        variant: index of the candidate among those of its format.
    """
    names = format_names()
    number = names.index(form) if form in names else len(names)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[variant % len(LINES)],
        "fillstyle": FILLS[variant % len(FILLS)],
    }


def numbered_style(number: int) -> dict[str, Any]:
    """Return matplotlib keywords, colour and marker, for a series that does not stand for a format."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def draw(path: Path, title: str, cells: int, fill: Callable[[list[Axes]], None]) -> Path:
    """Draw a PNG of several axes with one legend.

    Args:
        path: path of the file to write.
        title: title of the figure.
        cells: number of axes to draw.
        fill: draws; called with all axes of the grid, of which the first ``cells`` are shown.
    Returns:
        The path.
    Raises:
        SemisparseError: matplotlib is not installed.
    """
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
    shown: dict[str, Any] = {}
    for each in axes[:cells]:
        handles, labels = each.get_legend_handles_labels()
        shown = {**dict(zip(labels, handles, strict=True)), **shown}
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
