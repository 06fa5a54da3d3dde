"""Draw the figures of the documentation into this folder.

python docs/figures/draw.py
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from joint_tables import latest_runs

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""


def main() -> None:
    """Draw all figures."""
    matplotlib.rcParams |= {"svg.hashsalt": "semisparse", "svg.fonttype": "none", "font.family": "sans-serif"}
    which_recipe()
    what_it_gives()


def which_recipe() -> None:
    """Draw the decision figure of which-recipe.md."""
    figure, axes = pyplot.subplots(figsize=(10, 5.6))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 56)
    axes.set_axis_off()

    def box(x: float, y: float, text: str, colour: str, width: float = 23, height: float = 7.5) -> None:
        axes.add_patch(
            pyplot.Rectangle((x - width / 2, y - height / 2), width, height, facecolor=colour, alpha=0.18, linewidth=0)
        )
        axes.add_patch(
            pyplot.Rectangle(
                (x - width / 2, y - height / 2), width, height, fill=False, edgecolor=colour, linewidth=1.5
            )
        )
        axes.text(x, y, text, ha="center", va="center", fontsize=10, color="#222222")

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.2})
        if text:
            x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color="#222222", backgroundcolor="white")

    axes.add_patch(pyplot.Rectangle((0, 0), 100, 56, facecolor="white", linewidth=0))
    box(50, 51, "Are the zeros there already?", BLUE, 30)
    box(86, 51, "--set prune=none\nformat auto packs them", GREEN)
    arrow((65, 51), (74.3, 51), "yes")
    arrow((50, 47.2), (50, 41), "no")
    box(50, 37, "What is short?", BLUE, 30)
    box(15, 22, "memory, or the time per token\nof few sequences", ORANGE, 28)
    box(50, 22, "the time of prompts", ORANGE, 25)
    box(84, 22, "nothing: 16 bits fit,\nand batches are large", ORANGE, 26)
    arrow((40, 33.2), (18, 26), "bytes")
    arrow((50, 33.2), (50, 26), "operations")
    arrow((60, 33.2), (81, 26))
    box(15, 7, "--target bits=4.5, or less\n(in a hurry: dense-w4)", GREEN, 28, 9)
    box(50, 7, "--recipe slidesparse\n--set pattern=2:4\n(Hopper; int8)", GREEN, 25, 11)
    box(84, 7, "stay dense;\nask plan and frontier", GREEN, 26, 9)
    arrow((15, 18.2), (15, 11.8))
    arrow((50, 18.2), (50, 12.8))
    arrow((84, 18.2), (84, 11.8))
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(HERE / "which-recipe.svg", metadata={"Date": None})
    pyplot.close(figure)


def what_it_gives() -> None:
    """Draw the figure of README.md: KL against bits, and the time of a layer against tokens."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.1), layout="constrained")
    _quality(left)
    _speed(right)
    figure.savefig(HERE / "what-it-gives.png", dpi=132)
    pyplot.close(figure)


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _quality(axes: Axes) -> None:
    runs = latest_runs("babyllama-1m", mended=True)
    means = {
        run: tuple(sum(float(row[key]) for row in rows.values()) / len(rows) for key in ("bits", "kl"))
        for run, rows in runs.items()
        if "+" not in run
    }
    series = {
        "dense low bits, one recipe": (sorted(run for run in means if " g" in run), "s", BLUE),
        "W4, half of the groups dropped": (["W4S50"], "D", RED),
        "chosen by layer: --target bits=...": (sorted(run for run in means if run.startswith("auto")), "o", "black"),
    }
    for label, (names, marker, colour) in series.items():
        points = sorted(means[name] for name in names)
        line = "-" if marker == "o" else "none"
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, linestyle=line, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("stored bits per weight")
    axes.set_ylabel("KL to dense, nats per token")
    axes.set_title("Quality: babyllama-1m, tuned", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _speed(axes: Axes) -> None:
    shape = ("28672", "8192")
    tuned = [
        row
        for row in _rows("../semisparse/formats/tables/nvidia-h200.csv")
        if (row["n"], row["k"], row["dtype"]) == (*shape, "bfloat16") and int(row["m"]) <= 256
    ]
    fp8 = [
        row
        for row in _rows("h200/kernels-bfloat16.csv")
        if (row["n"], row["k"], row["format"]) == (*shape, "dense")
        and '"fp8"' in row["options"]
        and int(row["m"]) <= 256
    ]

    def of(form: str, pattern: str, kind: str) -> list[dict[str, str]]:
        return [row for row in tuned if (row["format"], row["pattern"], row["variant"]) == (form, pattern, kind)]

    dropped = of("gqs", "g16@50%", "w4")
    for label, rows, column, marker, colour in (
        ("dense 16 bits (cuBLAS)", dropped, "dense_us", "x", "black"),
        ("dense fp8", fp8, "us", "P", ORANGE),
        ("32:64 in 16 bits (bitmask)", of("bitmask", "32:64", ""), "us", "^", GREEN),
        ("W4, groups of 128 (gqs)", of("gqs", "g128@0%", "w4"), "us", "s", BLUE),
        ("W4, half of the groups dropped (gqs)", dropped, "us", "D", RED),
    ):
        best: dict[int, float] = {}
        for row in rows:
            best[int(row["m"])] = min(best.get(int(row["m"]), float("inf")), float(row[column]))
        axes.plot(*zip(*sorted(best.items()), strict=True), marker=marker, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds")
    axes.set_title("Speed: a layer of 28672 x 8192, one H200", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


if __name__ == "__main__":
    main()
