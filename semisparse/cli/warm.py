"""``semisparse warm``: compile a model's kernels beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.arguments import Device, Json, positive_integers
from semisparse.cli.output import console, print_json


def warm(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    device: Device = "auto",
    batches: Annotated[str, typer.Option("--batch", help="Sequences per batch, comma-separated.")] = "1",
    as_json: Json = False,
) -> None:
    """Compile the kernels that generating with a model needs, so that later starts compile nothing.

    Compiled code is kept in the user's cache directory (SEMISPARSE_CACHE).

    Example: `semisparse warm out`
    """
    from semisparse.api.start import importing

    counts = positive_integers(batches, "--batch")
    with importing(model, device):
        from semisparse.engine import Engine

    engine = Engine(model, device=device, bare=True)
    seconds = engine.warm(counts)
    if as_json:
        print_json({"compile_seconds": seconds, "load_seconds": engine.load_seconds})
        return
    console.print(f"compiled in {seconds:.1f} s; loading took {engine.load_seconds:.1f} s")
