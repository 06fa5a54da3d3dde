"""``semisparse frontier``: find the Pareto front of quality, size and speed, before anything is compressed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisparse.cli.arguments import Json, writable_file
from semisparse.cli.output import console, fill, print_json, print_table, progress_bar
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.api.frontier import Point


def frontier(
    model: Annotated[Path, typer.Argument(help="A dense model directory (config.json, *.safetensors, tokenizer).")],
    calib: Annotated[
        Path, typer.Option("--calib", help="Calibration text: .txt, or .jsonl with one document per line in 'text'.")
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", help="The machine that times are predicted for, as in `plan`; auto is this one.")
    ] = "auto",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Calibration sequences; by default 32,768 tokens in all.")
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option("--seqlen", help="Tokens per sequence; by default the model's context, 2048 at most.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to compute: auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="The random seed.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable_file, help="Also draw the front to this PNG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the Pareto front of KL divergence against bits, decode time and prompt time.

    Every pattern and number of bits is measured in every layer, on calibration text, without tuning. Nothing is packed.
    `compress --target` takes any point of the front, such as bits=3.0, and tunes it.

    Example: `semisparse frontier model --calib text.txt --gpu h200 --plot front.png`
    """
    from semisparse.api.frontier import frontier as measure

    if plot is not None:  # checked before the work, which takes minutes
        from semisparse.bench.pyplot import load_pyplot

        if plot.suffix.lower() != ".png":
            raise InputError(f"--plot draws a PNG file, got {plot}: give a name that ends in .png")
        load_pyplot()

    with progress_bar(shown=not as_json) as bars:
        task = bars.add_task("reading the model", total=None)

        def progress(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        front = measure(
            model, calib, gpu=gpu, samples=samples, seqlen=seqlen, device=device, seed=seed, progress=progress
        )
        fill(bars, task)
    if plot is not None:
        from semisparse.bench.plot_frontier import plot_frontier

        values = front.to_dict()
        plot_frontier(values["points"], values["uniform"], plot, f"{model.name}, times for {front.gpu}")
    if as_json:
        print_json(front.to_dict())
        return
    _show("Chosen by layer (compress --target ...)", "target", front.points)
    _show("One choice for all layers", "choice", sorted(front.uniform, key=lambda point: point.bits))
    console.print(
        f"[dim]KL on calibration tokens before tuning, which lowers it. Times are of a whole step, "
        f"predicted for {front.gpu}. {front.seconds:.0f} s.[/]",
    )


def _show(title: str, first: str, points: list[Point]) -> None:
    rows = [
        (
            point.recipe,
            f"{point.bits:.2f}",
            f"{point.kl:.4f}",
            f"{point.decode_ms:.3g}",
            f"{point.prompt_ms:.3g}",
        )
        for point in points
    ]
    print_table(title, (first, "bits/weight", "KL", "decode step, ms", "prompt of 2,048, ms"), rows)
