"""Plot the density of each linear layer as a heat map: one column per decoder layer, one row per projection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from semisparse.bench.pyplot import load_pyplot
from semisparse.errors import SemisparseError


def plot_densities(densities: Mapping[str, float], path: str | Path, title: str) -> None:
    """Plot the density of every linear layer to a PNG file.

    Args:
        densities: fraction of weights kept, 0 to 1, by module name; the number in the name is the decoder layer's.
        path: path of the file to write.
        title: title of the plot.
    Raises:
        SemisparseError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    grid: dict[str, dict[int, float]] = {}
    for name, density in densities.items():
        layer, projection = _split_name(name)
        grid.setdefault(projection, {})[layer] = density
    layers = range(1 + max(layer for row in grid.values() for layer in row))
    cells = [[row.get(layer, float("nan")) for layer in layers] for row in grid.values()]
    figure, axes = pyplot.subplots(figsize=(3 + 0.6 * len(layers), 1.5 + 0.45 * len(grid)), layout="constrained")
    image = axes.imshow(cells, cmap="viridis", aspect="auto")
    axes.set_xticks(layers)
    axes.set_yticks(range(len(grid)), list(grid))
    axes.set_xlabel("decoder layer")
    for row, values in enumerate(cells):
        for layer, density in enumerate(values):
            if density == density:  # not NaN: this decoder layer has the projection
                axes.text(layer, row, f"{100 * density:.0f}", ha="center", va="center", color="white", fontsize=8)
    figure.colorbar(image, label="density")
    axes.set_title(title, fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _split_name(name: str) -> tuple[int, str]:
    """Split ``model.layers.3.mlp.up_proj`` into decoder layer 3 and ``mlp.up_proj``."""
    parts = name.split(".")
    position = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if position is None:
        raise SemisparseError(f"{name} has no decoder layer's number in its name, as model.layers.3.mlp.up_proj has")
    return int(parts[position]), ".".join(parts[position + 1 :])
