"""``semisparse export``: write a compressed model for tools that do not know semisparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import bytes_text, console, print_json


def export(
    model: Annotated[Path, typer.Argument(help="A directory that semisparse compressed.")],
    to: Annotated[str, typer.Option("--to", help="dense or compressed-tensors.")],
    out: Annotated[Path, typer.Option("--out", help="The directory to write.")],
    as_json: Json = False,
) -> None:
    """Write a compressed model for tools that do not know semisparse.

    `dense` writes every weight with its zeros in place: as large as before, and readable by everything.
    `compressed-tensors` writes layers of 8 bits or less in that package's formats, with the same numbers, and layers in
    16 bits dense.

    Example: `semisparse export small --to dense --out plain`
    """
    from semisparse.api import export as export_model

    report = export_model(model, to, out)
    if as_json:
        print_json(report)
        return
    console.print(f"wrote {out}, {bytes_text(report['bytes'])}")
    if to == "dense":
        return
    _print_layers(report["dense_layers"], "are dense there, because compressed-tensors has no format for them")
    _print_layers(report["widened_layers"], "take 8 bits there, because their zero points are fractions of a code")


def _print_layers(names: list[str], what: str) -> None:
    if names:
        some = ", ".join(names[:3])
        console.print(f"{len(names)} layers {what}: {some}{', ...' if len(names) > 3 else ''}")
