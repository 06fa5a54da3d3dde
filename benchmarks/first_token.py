"""A prompt's pass and a batch's decode step, with x permuted by kernels of their own and by the norm or SiLU before.

    python benchmarks/first_token.py OUT.csv KERNELS.csv [--weights dense,bitmask,gqs,vector_nm,ec_csr] [--blocks 32]
        [--prompts 512] [--batches 32]

llama2-7b with random weights, bfloat16. Both variants are captured in CUDA graphs and replayed in turns; column
`same_bits` says whether their logits are equal. KERNELS.csv has the kernels of one replay: how often each runs, and its
microseconds in all.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from blocks import backend_of
from decode_step import WEIGHTS
from rows import write_rows
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.engine.projection import Projection
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")
ROUNDS, AT_ONCE = 7, 6
POSITION = 160
OWN, FUSED = "kernels of their own", "norm and SiLU"
Row = dict[str, str]


def captured(call: Callable[[], Tensor], permuting: str) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a call, and return the graph and its output."""
    unfused = patch.object(Projection, "permutation", lambda projection, m, dtype: None)
    with torch.no_grad():
        if permuting == OWN:
            unfused.start()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call()
        finally:
            if permuting == OWN:
                unfused.stop()
    return graph, output


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of a replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(AT_ONCE):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / AT_ONCE


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """Return the microseconds of each kernel's runs in a replay."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]].append(event.time_range.end - event.time_range.start)
    return times


def works(
    backend: DecoderBackend, prompts: list[int], batches: list[int]
) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Yield what is timed."""
    decoder = backend.decoder
    for length in prompts:
        backend.compile([[0] * length], 1, 0)
        backend._state_for(1, length + 1)
        tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).to(GPU)
        last, cache = torch.tensor([length - 1], device=GPU), Cache.make(decoder, 1, length)
        yield "prompt", length, lambda: decoder.padded_prompt(tokens, last, cache)  # noqa: B023
    for count in batches:
        backend.compile([[0] * 16] * count, POSITION, 0)
        state = backend._state_for(count, POSITION + 8)
        positions = torch.full((count,), POSITION, dtype=torch.int32, device=GPU)
        tokens = random_prompts(backend.vocabulary, Workload(count, 1, 1)).to(GPU)
        yield "step", count, lambda: decoder.step(tokens, positions, state.cache)  # noqa: B023


def measure(options: argparse.Namespace, weights: str) -> Iterator[tuple[Row, list[Row]]]:
    """Yield a row per work and variant, and the rows of its kernels."""
    model = random_model("llama2-7b", torch.bfloat16, GPU, WEIGHTS[weights], options.blocks)
    backend, facts = backend_of(model), device_facts(GPU)
    for work, count, call in works(backend, options.prompts, options.batches):
        variants = (OWN, FUSED) if weights != "dense" else (OWN,)
        graphs = {permuting: captured(call, permuting) for permuting in variants}
        times: dict[str, list[float]] = {permuting: [] for permuting in variants}
        for _ in range(ROUNDS):
            for permuting in variants:
                times[permuting].append(1e6 * seconds(graphs[permuting][0]))
        outputs = [output for _, output in graphs.values()]
        equal = all(torch.equal(output, outputs[0]) for output in outputs) and bool(outputs[0].isfinite().all())
        for permuting in variants:
            base = {
                "blocks": str(options.blocks),
                "weights": weights,
                "work": work,
                "count": str(count),
                "permuting": permuting if weights != "dense" else "",
            }
            own, software = times[permuting][1:], {"machine": facts.name, "software": facts.driver}
            row = {
                **base,
                "us": f"{median(own):.1f}",
                "low_us": f"{min(own):.1f}",
                "high_us": f"{max(own):.1f}",
                "same_bits": str(equal),
                **software,
            }
            found = [
                {**base, "kernel": name, "launches": str(len(runs)), "us": f"{sum(runs):.1f}", **software}
                for name, runs in sorted(kernels_of(graphs[permuting][0]).items(), key=lambda item: -sum(item[1]))
            ]
            yield row, found


def integers(text: str) -> list[int]:
    """Read comma-separated integers."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measure, and write the files after each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--weights", default="dense,bitmask,gqs,vector_nm,ec_csr")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--prompts", type=integers, default=[512])
    parser.add_argument("--batches", type=integers, default=[32])
    options = parser.parse_args()
    rows: list[Row] = []
    kernels: list[Row] = []
    for weights in options.weights.split(","):
        for row, found in measure(options, weights):
            rows.append(row)
            kernels += found
            write_rows(options.out, rows, list(rows[0]))
            write_rows(options.kernels, kernels, list(kernels[0]))
            print(*row.values(), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
