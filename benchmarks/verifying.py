"""Time of `semisparse inspect --verify` beside reading the files, both from the disk, each in a new process.

Usage: python benchmarks/verifying.py OUT.csv [--arch llama2-7b] [--blocks 32] [--weights bitmask:32:64,gqs:g16@50%]

The model has the architecture's decoder layers; all have the random weights of the first. Reading is
`cat FILES > /dev/null`. The two take turns, because the disk's rate changes within minutes; each row is one pair, and
the files are dropped from the page cache before each of its commands. With --cached as many pairs follow that leave
them there. `known` is 0 where the model's shapes, which the first `inspect --verify` records in the user's cache, are
removed before. `load` is the system's load average of a minute, before a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loading import compress_at_random, drop_from_cache
from rows import write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from semisparse.api.inspecting import FOLDER
from semisparse.bench.roofline import Candidate
from semisparse.bench.shapes import architecture
from semisparse.checkpoint import DIGESTS
from semisparse.integrations.transformers import mark_compressed, sparse_layers
from semisparse.runtime.cache import cache_directory

COLUMNS = (
    "model", "blocks", "weights", "cached", "known", "file_gb", "read_seconds", "verify_seconds", "ratio",
    "read_cpu_seconds", "verify_cpu_seconds", "load",
)  # fmt: skip
PAIRS = 3
FIRST = "model.layers.0."
SHARD_BLOCKS = 4
"""Decoder layers per safetensors file."""


def renamed(values: Mapping[str, Any], block: int) -> dict[str, Any]:
    """Return what belongs to the first decoder layer under the names of another."""
    return {name.replace(FIRST, f"model.layers.{block}."): value for name, value in values.items() if FIRST in name}


def write_directory(folder: Path, arch: str, blocks: int, weights: str) -> list[Path]:
    """Write a compressed model whose decoder layers are all the same, and return its safetensors files."""
    config = architecture(arch)
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    compress_at_random(model, Candidate(*weights.split(":", 1)))
    specs = {name: layer.packed.spec for name, layer in sparse_layers(model).items()}
    layers = {name: spec.to_dict() | {DIGESTS: {"any": ""}} for name, spec in specs.items()}
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "layers": layers})  # saving renews the digests
    model.save_pretrained(folder, max_shard_size="99GB")
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    shards = [range(0), *(range(first, min(first + SHARD_BLOCKS, blocks)) for first in range(0, blocks, SHARD_BLOCKS))]
    index = {}
    for number, held in enumerate(shards, 1):
        shard = {name: tensor for name, tensor in tensors.items() if FIRST not in name and not held}
        for block in held:
            shard |= {name: tensor.clone() for name, tensor in renamed(tensors, block).items()}
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    written = json.loads((folder / "config.json").read_text())
    block_config = written["quantization_config"]
    layers = block_config["layers"]
    block_config["layers"] = {name: entry for block in range(blocks) for name, entry in renamed(layers, block).items()}
    written["num_hidden_layers"] = blocks
    (folder / "config.json").write_text(json.dumps(written))
    return sorted(folder.glob("*.safetensors"))


def seconds_of(command: list[str], files: list[Path], cached: bool) -> tuple[float, float]:
    """Run a command with the files in the page cache or dropped from it; return its wall and its CPU seconds."""
    for file in files:
        if cached:
            file.read_bytes()
        else:
            drop_from_cache(file)
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--weights", default="bitmask:32:64,gqs:g16@50%", help="format:pattern, comma-separated")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--cached", action="store_true", help="then the same from the page cache")
    options = parser.parse_args()
    rows = []
    for weights in options.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            files = write_directory(Path(folder), options.arch, options.blocks, weights)
            size = sum(file.stat().st_size for file in files) / 1e9
            verify = [sys.executable, "-m", "semisparse.cli", "inspect", folder, "--verify"]
            for cached, known in [(0, 0), (0, 1)] * options.pairs + [(1, 1)] * options.pairs * options.cached:
                if not known:
                    shutil.rmtree(cache_directory() / FOLDER, ignore_errors=True)
                load = os.getloadavg()[0]
                read, read_cpu = seconds_of(["cat", *map(str, files)], files, bool(cached))
                verified, verify_cpu = seconds_of(verify, files, bool(cached))
                measured = (size, read, verified, verified / read, read_cpu, verify_cpu, load)
                figures = (
                    options.arch,
                    options.blocks,
                    weights,
                    cached,
                    known,
                    *(f"{value:.2f}" for value in measured),
                )
                rows.append(dict(zip(COLUMNS, figures, strict=True)))
                print(rows[-1], flush=True)
                write_rows(options.out, rows, COLUMNS)


if __name__ == "__main__":
    main()
