"""What makes a directory impossible to serve by vLLM on this machine, found before vLLM starts."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisparse.checkpoint import meta_model, open_directory
from semisparse.errors import FormatError, InputError
from semisparse.nn import check_slice
from semisparse.runtime.device import device_facts

CAPABILITY = (8, 0)
"""Minimum compute capability of the kernels of packed layers."""


def check_gpu(description: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Refuse a compressed directory that this machine's GPU cannot serve; dense ones are left to vLLM.

    vLLM's adapter refuses the same, and more exactly, in a page of traceback.

    Args:
        description: of the directory, from `inspect_directory`.
        arguments: the options for vLLM, of which the numbers of ranks are read.
    Raises:
        InputError: the GPU is too old, or its memory holds less than a rank's share of the compressed layers.
    """
    if not description["layer_bytes"]:
        return
    gpu, ranks = device_facts("cuda"), ranks_of(arguments)
    if gpu.capability < CAPABILITY:
        own, needed = (".".join(map(str, capability)) for capability in (gpu.capability, CAPABILITY))
        raise InputError(
            f"{gpu.name} has compute capability {own}, and the kernels of compressed layers need {needed}: serve "
            "them on a newer GPU"
        )
    # ec_csr has mask tiles beside its lists on Hopper GPUs only.
    on_gpu = description["gpu_layer_bytes" if gpu.capability == (9, 0) else "layer_bytes"]
    share = on_gpu / ranks
    if share > gpu.memory_bytes:
        raise InputError(
            f"the compressed layers take {share / 1e9:.1f} GB on each of {ranks} GPUs, and {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:.1f} GB: serve them on more GPUs (--tensor-parallel-size N) or on larger ones"
        )


def check_cuts(path: Path, arguments: Sequence[str]) -> None:
    """Refuse tensor-parallel ranks that cut a window of a pattern that its format needs, or columns that share a scale.

    vLLM's adapter refuses them for every architecture, in a traceback per rank. Here transformers' plan says which
    layers are split along K; one that it does not name, or that does not divide over the ranks, is left to vLLM.

    Args:
        path: the directory.
        arguments: the options for vLLM.
    Raises:
        InputError: a layer cannot be cut.
    """
    ranks = parallel_sizes(arguments)[0]
    if ranks == 1:
        return
    directory = open_directory(path)
    plan = meta_model(directory).tp_plan
    for name, packed in directory.layers.items():
        columns, rest = divmod(packed.shape[1], ranks)
        if rest or not str(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))).startswith("rowwise"):
            continue
        for rank in range(ranks):
            try:
                check_slice(packed.spec, 1, rank * columns, (rank + 1) * columns)
            except FormatError as error:
                raise InputError(f"layer {name} cannot be served on {ranks} tensor-parallel GPUs: {error}") from error


def ranks_of(arguments: Sequence[str]) -> int:
    """Return on how many GPUs options of vLLM split the layers."""
    tensor, pipeline = parallel_sizes(arguments)
    return tensor * pipeline


def parallel_sizes(arguments: Sequence[str]) -> tuple[int, int]:
    """Return tensor- and pipeline-parallel ranks in options of vLLM; what is no number is left for vLLM to refuse."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", dest="tensor", nargs="?")
    parser.add_argument("--pipeline-parallel-size", "--pipeline_parallel_size", "-pp", dest="pipeline", nargs="?")
    known, _ = parser.parse_known_args(list(arguments))
    tensor, pipeline = (int(size) if size and size.isdecimal() else 1 for size in (known.tensor, known.pipeline))
    return max(1, tensor), max(1, pipeline)
