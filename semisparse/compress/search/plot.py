"""The density that each layer was given, drawn as a heat map: a column a block, a row a projection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from semisparse.errors import SemisparseError


def plot_densities(densities: Mapping[str, float], path: str | Path, title: str) -> None:
    """Draw the density of every layer as PNG.

    Args:
        densities: share of weights kept, 0 to 1, by module name; the number in the name says the block.
        path: the file.
        title: above the plot.
    Raises:
        SemisparseError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SemisparseError("plots need matplotlib: pip install 'semisparse[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    grid: dict[str, dict[int, float]] = {}
    for name, density in densities.items():
        block, projection = _place(name)
        grid.setdefault(projection, {})[block] = density
    blocks = range(1 + max(block for row in grid.values() for block in row))
    shown = [[row.get(block, float("nan")) for block in blocks] for row in grid.values()]
    figure, axes = pyplot.subplots(figsize=(3 + 0.6 * len(blocks), 1.5 + 0.45 * len(grid)), layout="constrained")
    image = axes.imshow(shown, cmap="viridis", aspect="auto")
    axes.set_xticks(blocks)
    axes.set_yticks(range(len(grid)), list(grid))
    axes.set_xlabel("block")
    for row, values in enumerate(shown):
        for block, density in enumerate(values):
            if density == density:  # not NaN: this block has the projection
                axes.text(block, row, f"{100 * density:.0f}", ha="center", va="center", color="white", fontsize=8)
    figure.colorbar(image, label="density")
    axes.set_title(title, fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _place(name: str) -> tuple[int, str]:
    """Split ``model.layers.3.mlp.up_proj`` into block 3 and ``mlp.up_proj``."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        raise SemisparseError(f"layer {name} has no number of a block in its name")
    return int(parts[at]), ".".join(parts[at + 1 :])
