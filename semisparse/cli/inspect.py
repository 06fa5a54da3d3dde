"""``semisparse inspect``: describe a model directory layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import bytes_text, console, print_json, print_table, progress_bar


def inspect(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    verify: Annotated[bool, typer.Option("--verify", help="Validate every index, count, bit mask and digest.")] = False,
    as_json: Json = False,
) -> None:
    """Show format, pattern, density, bits per weight and bytes of every linear layer.

    Example: `semisparse inspect out --verify`
    """
    from semisparse.api import inspect_directory
    from semisparse.api.start import importing

    with importing(), progress_bar(shown=not as_json) as bars:
        task = bars.add_task("reading layers", total=None)
        description = inspect_directory(
            model, verify, progress=lambda done, total: bars.update(task, completed=done, total=total)
        )
    if as_json:
        print_json(description)
        return
    rows = [
        (
            layer["name"],
            layer["format"],
            layer["pattern"] or "",
            "x".join(map(str, layer["shape"])),
            "" if layer["density"] is None else f"{layer['density']:.4f}",
            f"{layer['bits_per_weight']:.3f}",
            bytes_text(layer["bytes"]),
        )
        for layer in description["layers"]
    ]
    print_table(str(model), ("layer", "format", "pattern", "N x K", "density", "bits/weight", "bytes"), rows)
    on_gpu, bits = description["gpu_layer_bytes"], description["bits_per_weight"] or 0
    share = on_gpu / max(description["layer_bytes"], 1)
    in_memory = [("compressed layers on a GPU, about", bytes_text(on_gpu), f"{bits * share:.3f}")] if share > 1 else []
    print_table(
        "whole model" + (", every tensor verified" if verify else ""),
        ("", "bytes", "bits/weight"),
        [
            ("compressed layers", bytes_text(description["layer_bytes"]), f"{bits:.3f}"),
            *in_memory,
            ("everything else", bytes_text(description["bytes"] - description["layer_bytes"]), ""),
            ("model", bytes_text(description["bytes"]), ""),
        ],
    )
    if verify and description["without_digests"]:
        console.print(
            f"{description['without_digests']} compressed layers have no digests in config.json: changed values pass",
        )
