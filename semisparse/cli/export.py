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
    `compressed-tensors` writes layers in int8 and fp8 in that package's formats, which vLLM reads, and all other layers
    dense.

    Example: `semisparse export small --to dense --out plain`
    """
    from semisparse.api import export as export_model

    report = export_model(model, to, out)
    if as_json:
        print_json(report)
        return
    console.print(f"wrote {out}, {bytes_text(report['bytes'])}", highlight=False)
    if to != "dense" and report["dense_layers"]:
        some = ", ".join(report["dense_layers"][:3])
        console.print(
            f"{len(report['dense_layers'])} layers are dense there, because compressed-tensors has no format for them: "
            f"{some}{', ...' if len(report['dense_layers']) > 3 else ''}",
            highlight=False,
        )
