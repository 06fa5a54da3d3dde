"""Prompts of a model launched from Python and as CUDA graphs, in turns: what launching costs.

    python benchmarks/captured_prompts.py OUT.csv [--arch llama3.2-1b] [--layers 16] [--weights dense,gqs]
        [--prompts 512,1024,1025,2048,4096] [--rounds 11]

Needs a GPU. Random weights, bfloat16. ``ms`` is the wall time until the host has the first token (``gpu`` and
``unpadded``: of a replay), the median of ``repeats``:

- ``python``: launched kernel by kernel, not padded.
- ``captured``: as a CUDA graph, padded.
- ``first`` and ``second``: the first use of a length, launched from Python and padded, and its second, which captures
  it; kernels are loaded. Of these there is one each.
- ``gpu``: the graph alone, replayed in a row: what the GPU needs. ``unpadded``: likewise, without padding.

The logits of the three uses must be the same bits, and close to those of ``python``. ``load`` is the host's load.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from blocks import backend_of, integers, replayed
from blocks import captured as graph_of
from torch import Tensor

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.bench.roofline import BASELINE, Candidate
from semisparse.bench.shapes import ARCHITECTURES, architecture
from semisparse.bench.table import write_csv
from semisparse.engine import prompts
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.patterns import NO_ZEROS
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")

WEIGHTS = {
    "dense": None,
    "dense int8": Candidate(BASELINE, NO_ZEROS, {"kind": "int8"}),
    "slide24 2:4 int8": Candidate("slide24", "2:4", {"kind": "int8"}),
    "bitmask": Candidate("bitmask", "32:64"),
    "gqs": Candidate("gqs", "g16@50%", {"kind": "w4"}),
}


@dataclass(frozen=True)
class Row:
    """A line of the CSV."""

    arch: str
    layers: int
    weights: str
    tokens: int
    way: str
    ms: float
    low_ms: float
    high_ms: float
    repeats: int
    load: float
    machine: str
    software: str


def first_token(backend: DecoderBackend, tokens: list[list[int]]) -> tuple[float, Tensor]:
    """Run a prompt; return the seconds until the host has the first token, and the logits that it is chosen by."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    _, logits = backend.begin(tokens, len(tokens[0]) + 1)
    logits.argmax(-1).tolist()
    return time.perf_counter() - start, logits


@torch.no_grad()
def measure(backend: DecoderBackend, length: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way to run a prompt.

    Raises:
        RuntimeError: the logits of two ways differ.
    """
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).tolist()
    backend.compile(tokens, 1, 0)
    backend.prompts.captures = False
    _, unpadded = first_token(backend, tokens)  # loads what is not loaded yet
    backend.prompts = prompts.Prompts(backend.decoder, captures=True)
    first, expected = first_token(backend, tokens)
    second, captured = first_token(backend, tokens)
    _, replay = first_token(backend, tokens)
    similarity = torch.cosine_similarity(unpadded.float(), expected.float(), dim=1).min()
    same = torch.equal(expected, captured) and torch.equal(expected, replay)
    if not (same and similarity > 0.99):
        raise RuntimeError(
            f"{length} tokens: logits differ; same bits: {same}; similarity to unpadded: {similarity:.4f}"
        )
    found: dict[str, list[float]] = {"python": [], "captured": []}
    for _ in range(rounds):
        for captures, way in enumerate(found):
            backend.prompts.captures = bool(captures)
            found[way].append(first_token(backend, tokens)[0])
    (graph,) = (each._graph for each in backend.prompts._graphs.values())
    assert graph is not None
    graphs = {"gpu": graph}
    cache = Cache.make(backend.decoder, 1, length)
    on_gpu, last = torch.tensor(tokens, device=GPU), torch.tensor([length - 1], device=GPU)
    if next(iter(backend.prompts._graphs))[1] != length:
        graphs["unpadded"] = graph_of(lambda: backend.decoder.padded_prompt(on_gpu, last, cache))
    found |= {"first": [first], "second": [second]} | {way: [] for way in graphs}
    for _ in range(3):
        for way, one in graphs.items():
            found[way] += replayed(one, 3)
    return found


def rows(options: argparse.Namespace, weights: str) -> Iterator[Row]:
    """Build a model, and measure it."""
    model = random_model(options.arch, torch.bfloat16, GPU, WEIGHTS[weights], options.layers)
    backend, facts = backend_of(model), device_facts(GPU)
    for length in options.prompts:
        try:
            found = measure(backend, length, options.rounds)
        except RuntimeError as error:
            print(f"{weights}: {error}", flush=True)
            continue
        for way, seconds in found.items():
            ms = [round(1e3 * value, 3) for value in seconds]
            ran = (len(ms), round(os.getloadavg()[0], 1), facts.name, facts.driver)
            yield Row(options.arch, options.layers, weights, length, way, round(median(ms), 3), min(ms), max(ms), *ran)


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama3.2-1b")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of all")
    parser.add_argument("--weights", default="dense,gqs,slide24 2:4 int8")
    parser.add_argument("--prompts", type=integers, default=[512, 1024, 1025, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    options.layers = options.layers or architecture(options.arch).num_hidden_layers
    prompts.MAX_TOKENS = max(prompts.MAX_TOKENS, *options.prompts)
    found: list[Row] = []
    for weights in options.weights.split(","):
        for row in rows(options, weights):
            found.append(row)
            write_csv(options.out, found)
            print(row.weights, row.tokens, row.way, row.ms, row.low_ms, row.high_ms, row.load, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
