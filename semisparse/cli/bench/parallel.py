"""``semisparse bench parallel``: time prefill and decode of a model over several devices."""

from __future__ import annotations

from typing import Annotated

import typer

from semisparse.cli.arguments import (
    Batch,
    Device,
    Dtype,
    Formats,
    Json,
    NewTokens,
    OutCsv,
    Patterns,
    PromptTokens,
    comma_separated,
    dtype_named,
)
from semisparse.cli.bench.model import report, write_rows
from semisparse.errors import InputError


def parallel(
    arch: Annotated[str, typer.Option(help="Architectures with random weights, comma-separated.")] = "llama2-13b",
    formats: Formats = None,
    patterns: Patterns = None,
    batch: Batch = 1,
    prompt: PromptTokens = 512,
    new: NewTokens = 128,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: OutCsv = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decode of a model over several devices, by transformers' tensor parallelism.

    Example: `torchrun --nproc-per-node 2 -m semisparse.cli bench parallel --arch llama2-13b`
    """
    from semisparse.api import pick_device
    from semisparse.bench.model import Workload
    from semisparse.bench.parallel import is_first_rank, measure_parallel, ranks
    from semisparse.bench.roofline import candidates

    if ranks() < 2:
        raise InputError(
            "bench parallel needs at least 2 processes, got 1. Start it with: "
            "torchrun --nproc-per-node 2 -m semisparse.cli bench parallel"
        )
    target, workload = pick_device(device), Workload(batch, prompt, new)
    compared = [None, *candidates(comma_separated(formats), comma_separated(patterns))[1:]]
    speeds = (
        speed
        for name in comma_separated(arch) or []
        for speed in measure_parallel(name, dtype_named(dtype), target, compared, workload)
    )
    rows = write_rows(speeds, out if is_first_rank() else None)
    if is_first_rank():
        report(rows, as_json)
