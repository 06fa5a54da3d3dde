"""Plot a Pareto front of KL divergence against stored bits, decode time and prompt time, beside uniform choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisparse.bench.pyplot import load_pyplot, style_of

AXES = (
    ("bits", "stored bits per weight"),
    ("decode_ms", "decode step of one token, ms (predicted)"),
    ("prompt_ms", "prompt of 2,048 tokens, ms (predicted)"),
)

OFFSETS = ((4, 3, "left"), (4, -9, "left"), (-4, 3, "right"), (-4, -9, "right"), (4, 10, "left"), (-4, 10, "right"))
"""Positions of a label beside its point that are tried: right and up in points, and how the text is aligned."""

BITS = (2, 3, 4, 6, 8, 12, 16)
"""Ticks of the axis of stored bits."""


def plot_frontier(
    points: Sequence[Mapping[str, Any]], uniform: Sequence[Mapping[str, Any]], path: Path, title: str
) -> None:
    """Draw the front as a PNG.

    Args:
        points: the points of the front, each with ``kl`` and the keys of `AXES`.
        uniform: points with one choice for all layers, with the same keys and ``recipe``.
        path: path of the file to write.
        title: title of the plot.
    Raises:
        SemisparseError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    figure, cells = pyplot.subplots(1, len(AXES), figsize=(17, 5.5), layout="constrained", sharey=True)
    formats = list(dict.fromkeys(str(point["recipe"]).split()[0] for point in uniform))
    smallest = min((point["kl"] for point in [*points, *uniform] if point["kl"] > 0), default=1e-3)
    for axes, (key, label) in zip(cells, AXES, strict=True):
        for form in formats:
            uniform_points = [point for point in uniform if str(point["recipe"]).split()[0] == form]
            axes.scatter(
                [point[key] for point in uniform_points],
                [max(point["kl"], smallest / 2) for point in uniform_points],
                marker=style_of(form)["marker"],
                color=style_of(form)["color"],
                label=f"{form} everywhere",
            )
        front = _front(points, key)
        axes.plot(
            [point[key] for point in front],
            [max(point["kl"], smallest / 2) for point in front],
            color="black",
            marker=".",
            label="chosen by layer",
        )
        if key == "bits":
            axes.set_xscale("log")
            axes.set_xticks(BITS, [str(bits) for bits in BITS])
            axes.minorticks_off()
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.margins(x=0.08)
    cells[0].set_ylabel("KL to dense, nats per token, before tuning")
    figure.legend(*cells[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    for axes, (key, _) in zip(cells, AXES, strict=True):
        _label(axes, [(point[key], max(point["kl"], smallest / 2), str(point["recipe"])) for point in uniform])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Label points (x, y, recipe) where labels cover neither each other nor the frame; leave out those that would."""
    figure = axes.figure
    figure.canvas.draw()  # sizes of texts are known from here on
    taken: list[Any] = []
    inside = axes.get_window_extent()
    for x, y, recipe in points:
        for right, up, alignment in OFFSETS:
            text = axes.annotate(
                " ".join(recipe.split()[1:]),
                (x, y),
                (right, up),
                fontsize=6,
                textcoords="offset points",
                horizontalalignment=alignment,
            )
            box = text.get_window_extent()
            fits = inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1
            if fits and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _front(points: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Return the Pareto front of ``key`` and KL, sorted by ``key``."""
    front: list[Mapping[str, Any]] = []
    for point in sorted(points, key=lambda each: (each[key], each["kl"])):
        if not front or point["kl"] < front[-1]["kl"]:
            front.append(point)
    return front
