"""Seconds per decoder layer on several GPUs together, and on each of them alone.

Usage: torchrun --nproc-per-node 2 benchmarks/compressing_pair.py OUT.csv PARTS.csv [--arch llama2-7b] [--blocks 3]

The model has random weights and the calibration text is random tokens. Decoder layers are compressed by SparseGPT 32:64
with its gains, packed, and written to a temporary directory, as by the command `compress`; reading the model and
writing the result are left out. First the ranks compress the model together; then every rank does so alone, at the same
time. A row has the seconds from the pruning of a layer's last linear layer to that of the next one's; the first row
begins before any work, and has compilation if the ranks work together. The second CSV has the parts of each layer
(stage_times.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compressing import PART_COLUMNS, print_now
from compressing_blocks import random_batches
from rows import read_rows, write_rows
from stage_times import stage_times
from transformers import AutoModelForCausalLM

from semisparse.api import joined_ranks, read_recipe
from semisparse.api.packed_layers import PackedLayers
from semisparse.bench.shapes import architecture
from semisparse.compress import Journal, Ranks, compress_decoder_layers
from semisparse.compress.distributed.ranks import SeveralRanks

COLUMNS = ("model", "tokens", "device", "ranks", "rank", "layer", "seconds")

LINEARS = 7
"""Linear layers of a decoder layer."""


def main() -> None:
    """Append a row per layer, rank and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=262_144)
    options = parser.parse_args()
    config = architecture(options.arch)
    config.num_hidden_layers, config.vocab_size = options.blocks, 1024
    with joined_ranks(print_now):
        on_gpu, rank = torch.cuda.is_available(), dist.get_rank()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        plan = read_recipe("rheosparse", ["search=none"])
        for ranks in (SeveralRanks(device), Ranks()):
            torch.manual_seed(0)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model = model.to("cpu").eval()
            batches = random_batches(model, options.tokens, device.type)
            dist.barrier()
            seconds: list[float] = []

            def mark(stage: str, done: int, total: int, seconds: list[float] = seconds) -> None:
                if done % LINEARS == 0 and done // LINEARS == len(seconds):
                    if on_gpu:
                        torch.cuda.current_stream().synchronize()
                    seconds.append(time.perf_counter())
                    print(f"{seconds[-1] - seconds[0]:8.3f} s  {stage} {done}/{total}", flush=True)

            with tempfile.TemporaryDirectory() as folder, stage_times() as times:
                pack = partial(PackedLayers, model, plan, choices={}, kept={}, mapped=True)
                with pack(journal=Journal(folder, {})) as store:
                    how: dict[str, Any] = {"device": device, "progress": mark, "store": store, "ranks": ranks}
                    compress_decoder_layers(model, batches, plan, **how)
            facts = torch.cuda.get_device_name() if on_gpu else "cpu"
            spent = [f"{after - before:.3f}" for before, after in pairwise(seconds)]
            run = (options.arch, options.tokens, facts, ranks.count, rank)
            values = [(*run, layer, each) for layer, each in enumerate(spent, 1)]
            parts = [(ranks.count, rank, *key, f"{each:.4f}") for key, each in times.seconds.items()]
            for turn in range(dist.get_world_size()):  # one rank after another
                if turn == rank:
                    rows = [dict(zip(COLUMNS, map(str, each), strict=True)) for each in values]
                    write_rows(options.out, read_rows(options.out) + rows, COLUMNS)
                    rows = [dict(zip(PART_COLUMNS, map(str, each), strict=True)) for each in sorted(parts)]
                    write_rows(options.parts, read_rows(options.parts) + rows, PART_COLUMNS)
                    print(f"rank {rank} of {ranks.count}: {', '.join(spent)}", flush=True)
                dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    main()
