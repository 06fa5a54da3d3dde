"""``semisparse bench``: measure kernels, models and the machine, and check the plan against what was measured."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisparse.cli.arguments import DTYPES, dtype_named, numbers, shape_names, words
from semisparse.cli.output import console, print_json, print_table, progress_bar
from semisparse.errors import InputError

if TYPE_CHECKING:
    import torch

    from semisparse.bench.kernels import Measurement, Skipped
    from semisparse.bench.model import ModelSpeed
    from semisparse.bench.roofline import Candidate

app = typer.Typer(no_args_is_help=True, help="Measure kernels, models and the machine.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help=f"Of weights and activations: {', '.join(DTYPES)}.")]


@app.command()
def kernels(
    shapes: Annotated[
        str, typer.Option(help="By commas: architectures (with :fused for fused layers), model directories, N,K.")
    ] = "llama2-7b",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens M, by commas.")] = "1,8,16,128,1024,4096",
    formats: Annotated[str | None, typer.Option(help="Formats, by commas; all by default.")] = None,
    patterns: Annotated[str | None, typer.Option(help="Patterns, by commas; the recipes' own by default.")] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="A CSV file to write; plots go beside it.")] = None,
    as_json: Json = False,
) -> None:
    """Time every kernel on every shape, beside dense and beside its floor."""
    from semisparse.bench.kernels import Measurement, Setting, measure_layer
    from semisparse.bench.machines import find_machine
    from semisparse.bench.plot import plot_all
    from semisparse.bench.roofline import candidates
    from semisparse.bench.shapes import layer_shapes
    from semisparse.bench.table import write_csv

    where = _device(device)
    chosen = candidates(words(formats), words(patterns))
    layers = [(name, layer) for name in shape_names(shapes) for layer in layer_shapes(name)]
    counts = numbers(tokens, "--tokens")
    machine = find_machine(where.type)
    found: list[Measurement] = []
    skipped: list[Skipped] = []
    with progress_bar(not as_json) as bars:
        task = bars.add_task("layers", total=len(layers))
        for name, layer in layers:
            setting = Setting(name, dtype_named(dtype), where, machine)
            for result in measure_layer(setting, layer, counts, chosen):
                if isinstance(result, Measurement):
                    found.append(result)
                else:
                    skipped.append(result)
            if out is not None and found:
                write_csv(out, found)
            bars.advance(task)
    if out is not None and found:
        plot_all(found, out.parent)
    if as_json:
        print_json({"rows": [asdict(row) for row in found], "skipped": [asdict(row) for row in skipped]})
    else:
        _show_kernels(found, skipped)


@app.command()
def model(
    checkpoint: Annotated[Path | None, typer.Argument(help="A model directory, dense or compressed.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="The dense model's directory, measured beside it.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="Architectures with random weights, by commas, instead of a directory.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="With --arch: formats, by commas, measured beside the model without semisparse.")
    ] = None,
    pattern: Annotated[str | None, typer.Option(help="With --arch: their pattern; their recipes' by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decode of a whole model, dense beside compressed."""
    from semisparse.bench.model import Workload, measure_each, measure_in_engine, measure_model, random_model
    from semisparse.bench.table import write_csv
    from semisparse.engine import Engine

    if (checkpoint is None) == (arch is None):
        raise InputError("bench model takes a model directory or --arch NAME, one of the two")
    where = _device(device)
    workload = Workload(batch, prompt, new)
    found: list[ModelSpeed] = []
    chosen = [None, *(_candidate(form, pattern) for form in words(format) or [])]
    for name in words(arch) or []:
        build = partial(random_model, name, dtype_named(dtype), where)
        for row in measure_each(build, name, chosen, workload, measure_in_engine):
            found.append(row)
            if out is not None:
                write_csv(out, found)
    if checkpoint is not None:
        paths = {"dense": baseline, "as stored": checkpoint}
        found += [
            measure_model(Engine(path, device=where.type), path.name, label, workload)
            for label, path in paths.items()
            if path
        ]
        if out is not None:
            write_csv(out, found)
    if as_json:
        print_json({"rows": [asdict(row) for row in found]})
    else:
        _show_models(found)


@app.command()
def parallel(
    arch: Annotated[str, typer.Option(help="Architectures with random weights, by commas.")] = "llama2-13b",
    formats: Annotated[str | None, typer.Option(help="Formats beside dense, by commas; all by default.")] = None,
    patterns: Annotated[str | None, typer.Option(help="Patterns, by commas; the recipes' own by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decode of a model spread over several devices.

    Example: `torchrun --nproc-per-node 2 -m semisparse.cli bench parallel --arch llama2-13b`
    """
    from semisparse.bench.model import Workload
    from semisparse.bench.parallel import is_first_rank, measure_parallel, ranks
    from semisparse.bench.roofline import candidates
    from semisparse.bench.table import write_csv

    if ranks() < 2:
        raise InputError("bench parallel measures several processes: start it with torchrun --nproc-per-node N -m ...")
    where, workload = _device(device), Workload(batch, prompt, new)
    chosen = [None, *candidates(words(formats), words(patterns))[1:]]
    found: list[ModelSpeed] = []
    for name in words(arch) or []:
        for row in measure_parallel(name, dtype_named(dtype), where, chosen, workload):
            found.append(row)
            if out is not None and is_first_rank():
                write_csv(out, found)
    if not is_first_rank():
        return
    if as_json:
        print_json({"rows": [asdict(row) for row in found]})
    else:
        _show_models(found)


@app.command()
def machine(
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="A CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: bandwidth, peaks, and what a launch costs."""
    from semisparse.bench.machine_facts import machine_facts
    from semisparse.bench.table import write_csv

    found = machine_facts(_device(device))
    if out is not None:
        write_csv(out, found)
    if as_json:
        print_json({"rows": [asdict(fact) for fact in found]})
    else:
        print_table(found[0].machine, ["what", "value", "unit"], [[f.name, f"{f.value:,.4g}", f.unit] for f in found])


@app.command(name="compare")
def compare_with_plan(
    results: Annotated[Path, typer.Argument(help="A CSV file that `bench kernels` wrote.")],
    gpu: Annotated[str, typer.Option(help="The machine it was measured on, as `plan` knows it.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show how far the plan's predictions are from what was measured."""
    from semisparse.bench.compare import compare, median_errors
    from semisparse.bench.kernels import Measurement
    from semisparse.bench.machines import find_machine
    from semisparse.bench.table import read_csv

    found = compare(read_csv(results, Measurement), find_machine(gpu))
    errors = median_errors(found)
    if as_json:
        print_json({"rows": [asdict(row) for row in found], "median_error": errors})
        return
    print_table(
        "Predicted and measured",
        ["format", "N, K", "M", "us", "predicted us", "error"],
        [
            [
                row.candidate,
                f"{row.n}, {row.k}",
                str(row.m),
                f"{row.us:,.1f}",
                f"{row.predicted_us:,.1f}",
                f"{row.error:+.0%}",
            ]
            for row in found
        ],
    )
    print_table("Median size of the error", ["format", "error"], [[name, f"{e:.0%}"] for name, e in errors.items()])


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="A CSV file that `bench kernels` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The folder for the PNG files; the CSV's own by default.")] = None,
) -> None:
    """Draw the plots of a CSV again."""
    from semisparse.bench.kernels import Measurement
    from semisparse.bench.plot import plot_all
    from semisparse.bench.table import read_csv

    for path in plot_all(read_csv(results, Measurement), out or results.parent):
        console.print(str(path))


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"--device takes auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU on this machine")
    return torch.device(name)


def _candidate(form: str, pattern: str | None) -> Candidate:
    from semisparse.bench.roofline import candidates

    offered = [c for c in candidates([form], None if pattern is None else [pattern]) if c.format == form]
    if not offered:
        raise InputError(f"format {form} has no recipe with a pattern: give --pattern")
    return offered[0]


def _show_kernels(found: list[Measurement], skipped: list[Skipped]) -> None:
    columns = [
        "format",
        "kernel",
        "N, K",
        "M",
        "us",
        "10-90 %",
        "floor us",
        "of floor",
        "dense us",
        "speed-up",
        "error",
    ]
    rows = [
        [
            row.candidate.label,
            row.kernel,
            f"{row.n}, {row.k}",
            str(row.m),
            f"{row.us:,.1f}",
            f"{row.low_us:,.1f}-{row.high_us:,.1f}",
            f"{row.floor_us:,.1f}",
            f"{row.fraction:.0%}",
            f"{row.dense_us:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.error:.1e}",
        ]
        for row in found
    ]
    title = f"{found[0].machine}, {found[0].software}, {found[0].dtype}" if found else "Nothing could be measured"
    print_table(title, columns, rows)
    ran = {row.candidate.label for row in found}
    for reason in dict.fromkeys(f"{s.candidate} {s.kernel}: {s.reason}" for s in skipped if s.candidate not in ran):
        console.print(f"[dim]not run: {reason}[/]", highlight=False)


def _show_models(found: list[ModelSpeed]) -> None:
    columns = [
        "model",
        "weights",
        "batch",
        "prompt",
        "first token ms",
        "prefill tok/s",
        "decode ms",
        "decode tok/s",
        "GB",
        "peak GB",
    ]
    rows = [
        [
            row.model,
            row.weights,
            str(row.batch),
            str(row.prompt),
            f"{row.first_token_ms:,.1f}",
            f"{row.prefill_tokens_per_second:,.0f}",
            f"{row.decode_ms:,.2f}",
            f"{row.decode_tokens_per_second:,.1f}",
            f"{row.weight_gb:,.2f}",
            f"{row.peak_gb:,.2f}",
        ]
        for row in found
    ]
    print_table(f"{found[0].machine}, {found[0].software}", columns, rows)
