"""``semisparse compress``: run a recipe on a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import (
    INTERRUPTED,
    bytes_text,
    console,
    fill,
    print_json,
    print_table,
    progress_bar,
    say_interrupted,
    speak,
)
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.api import CompressionReport

RECIPES = (
    "auto",
    "slidesparse",
    "nm-spmm",
    "ec-spmv",
    "rheosparse",
    "gqsa",
    "dense-w8",
    "dense-w4",
    "dense-w3",
    "dense-w2",
    "keep",
)
"""The built-in recipes, for the help text."""


def compress(
    model: Annotated[
        Path,
        typer.Argument(
            help="A model directory (config.json, *.safetensors, tokenizer): dense, or quantised as GPTQ, AWQ, fp8 or "
            "compressed-tensors."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The directory to write; it must not exist.")],
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help=f"A YAML file, or one of: {', '.join(RECIPES)}. With --target it is auto."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="What recipe auto must reach: bits=3.0, size=0.2, decode=2.5x, prompt=1.3x or "
            "batch32=1.5x; repeat it for several.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="The machine for which --target's speed-ups hold, as in `plan`; else this one."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a key of the recipe: pattern=6:8, prune=wanda, ...")
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option("--calib", help="Calibration text: .txt, or .jsonl with one document per line in 'text'."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", help="Calibration sequences; by default 262,144 tokens in all, fewer for narrow layers."
        ),
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option("--seqlen", help="Tokens per sequence; by default the model's context, 2048 at most.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; it holds one decoder layer at a time.")
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="The random seed.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run with the same --out.")] = False,
    offload: Annotated[
        Path | None,
        typer.Option("--offload", help="A directory on a disk for the hidden states of the calibration tokens."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a model's linear layers sparse or low-bit, by a recipe or for a target, and pack them.

    A pattern says what is kept: `6:8` keeps 6 of every 8 weights of a row; `16:32v32` 16 of every 32 vectors of 32
    rows; `g16@50%` drops half of the groups of 16; `70%` drops 70 %, anywhere. Keys of --set are pattern, prune
    (magnitude, wanda, sparsegpt, none), quant (none, w8 to w2, w4a8, int8, fp8), format, search, tune, ignore; the
    error for an unknown key lists all.

    Unfinished work is kept in OUT.partial. The same command with --resume continues it, with the same result.

    Several GPUs or hosts share the work under torchrun: `torchrun --nproc-per-node 8 -m semisparse.cli compress ...`.

    Examples: `semisparse compress model --target bits=3.0 --calib text.txt --out out` chooses pattern, bits and format
    of every layer; `semisparse compress model --recipe rheosparse --set pattern=16:32 --calib text.txt --out out`.
    """
    from semisparse import api
    from semisparse.api.start import importing

    with importing(model):  # no GPU's context: every rank of torchrun would create one on the first GPU
        run = api.compress

    with api.joined_ranks(speak) as rank:
        console.quiet = rank > 0
        targets = api.parse_targets(target or ())
        if recipe is None and not targets:
            raise InputError(f"give --recipe ({', '.join(RECIPES)}, or a YAML file) or --target (such as bits=3.0)")

        try:
            with progress_bar(shown=not as_json) as bars:
                task = bars.add_task("reading the model", total=None)

                def progress(stage: str, done: int, total: int) -> None:
                    bars.update(task, description=stage, completed=done, total=total)

                report = run(
                    model,
                    recipe=recipe or "auto",
                    target=targets,
                    gpu=gpu,
                    calibration=calib,
                    out=out,
                    settings=settings or (),
                    samples=samples,
                    seqlen=seqlen,
                    device=device,
                    seed=seed,
                    resume=resume,
                    offload=offload,
                    progress=progress,
                    inform=lambda sentence: console.print(sentence),
                )
                fill(bars, task)
        except KeyboardInterrupt as error:
            say_interrupted("interrupted; the same command with --resume goes on")
            raise typer.Exit(INTERRUPTED) from error
    if rank > 0:
        return
    if as_json:
        print_json(report.to_dict())
        return
    _show(f"{model} to {out}", report)


def _show(title: str, report: CompressionReport) -> None:
    _show_layers(title, report.layers)
    if report.tuning:
        _show_tuning(report.tuning)
    if report.target and report.reached and report.search:
        _show_target(report.target, report.reached, report.search)
    elif report.search:
        _show_search(report.search)
    _show_bytes(report)
    _show_rivals(report)


def _show_layers(title: str, layers: list[dict[str, Any]]) -> None:
    rows = [
        (
            layer["name"],
            layer["pattern"],
            layer["format"],
            f"{layer['density']:.4f}",
            f"{layer['bits_per_weight']:.2f}",
            "" if layer["error"] is None else f"{layer['error']:.4f}",
            layer["outcome"].partition(", bqpo")[0],  # the next table has what tuning did
        )
        for layer in layers
    ]
    print_table(title, ("layer", "pattern", "format", "density", "bits", "error", "outcome"), rows)


def _show_search(search: dict[str, Any]) -> None:
    console.print(
        f"search: KL to dense on the search's tokens {search['uniform_kl']:.4f} with the same pattern everywhere, "
        f"{search['kl']:.4f} with the patterns found, after {search['evaluations']} evaluations"
    )


def _show_bytes(report: CompressionReport) -> None:
    console.print(f"dense: {_dense_text(report.dense)}; {report.dense_share:.1%} of the bytes of all linear weights")
    console.print(
        f"linear layers: {bytes_text(report.bytes_before)} before, {bytes_text(report.bytes_after)} after "
        f"({report.bytes_after / max(report.bytes_before, 1):.3f}); {report.seconds:.1f} s"
    )
    if report.bytes_on_gpu > report.bytes_after:
        console.print(f"on a GPU they take about {bytes_text(report.bytes_on_gpu)}")


def _show_rivals(report: CompressionReport) -> None:
    """Say where a dense model would keep more, and where it would be as fast."""
    if report.rival:
        rival = report.rival
        console.print(
            f"at these bytes {rival['recipe']} would keep more: KL to dense {rival['kl']:.3g} against "
            f"{rival['own_kl']:.3g} on {rival['tokens']} calibration tokens, rounded to nearest and not tuned"
        )
    if report.no_gain:
        console.print(
            f"not faster than dense on {report.no_gain['machine']} at any number of tokens: "
            f"{_first_of(report.no_gain['layers'])}; `semisparse plan` shows the times"
        )
    slower = report.slower or {"from": {}}
    for tokens, layers in slower["from"].items():
        console.print(
            f"slower than dense on {slower['machine']} from {tokens} tokens per step on: {_first_of(layers)}; "
            "`semisparse plan` shows the times"
        )


def _first_of(layers: list[str]) -> str:
    return f"{layers[0]} and {len(layers) - 1} more layers" if len(layers) > 1 else layers[0]


def _dense_text(dense: list[dict[str, Any]]) -> str:
    """Return what stays dense, by reason: the first layer and the number of others."""
    reasons: dict[str, list[str]] = {}
    for layer in dense:
        reasons.setdefault(layer["reason"], []).append(layer["name"])
    parts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in reasons.items()
    ]
    return ", ".join(parts) or "nothing"


def _show_target(target: dict[str, float], reached: dict[str, float], search: dict[str, Any]) -> None:
    """Print each target beside the value that the model reaches, and the best single choice for all layers."""
    rows = [(key, f"{value:.4g}", f"{reached[key]:.4g}") for key, value in target.items()]
    print_table("Target", ("target", "asked", "reached"), rows)
    uniform = (
        "no single choice for all layers reaches it"
        if search["uniform"] is None
        else f"{search['uniform']} is the best single choice for all layers that reaches it"
    )
    console.print(
        f"search: KL to dense on the search's tokens before tuning {search['kl']:.4f}; {uniform}; "
        f"{search['evaluations']} evaluations",
    )
    if "tuned" in search:
        tuned = ", ".join(f"{label} {kl:.4f}" for label, kl in search["tuned"].items())
        console.print(f"KL after tuning: {tuned}; taken: {search['taken']}")


def _show_tuning(tuning: list[dict[str, Any]]) -> None:
    rows = [
        (
            stage["stage"],
            f"{stage['before']:.4g}",
            f"{stage['after']:.4g}",
            str(stage["steps"]),
            f"{stage['seconds']:.1f}",
            "" if stage["peak_bytes"] is None else bytes_text(stage["peak_bytes"]),
            stage["failure"] or "",
        )
        for stage in tuning
    ]
    columns = ("tuned", "held-out loss", "after", "steps", "seconds", "GPU", "stopped because")
    print_table("Tuning", columns, rows)
