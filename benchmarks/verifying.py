"""Time of `semisparse inspect --verify` beside reading the files, both from the disk, each in a new process.

Usage: python benchmarks/verifying.py OUT.csv [--arch llama2-7b] [--blocks 8] [--weights bitmask:32:64,gqs:g16@50%]

The model has the architecture's first decoder layers with random weights. Reading is
`cat FILES > /dev/null`. The two take turns, because the disk's rate changes within minutes; each row is one pair.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from loading import compress_at_random, drop_from_cache
from rows import write_rows
from transformers import AutoModelForCausalLM

from semisparse.bench.roofline import Candidate
from semisparse.bench.shapes import architecture
from semisparse.nn import is_linear

COLUMNS = ("model", "blocks", "weights", "file_gb", "read_seconds", "verify_seconds", "ratio")
PAIRS = 3


def seconds_of(command: list[str], files: list[Path]) -> float:
    """Run a command with the files dropped from the page cache; return its wall seconds."""
    for file in files:
        drop_from_cache(file)
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default="bitmask:32:64,gqs:g16@50%", help="format:pattern, comma-separated")
    options = parser.parse_args()
    config = architecture(options.arch)
    config.num_hidden_layers = options.blocks
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    rows = []
    for weights in options.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            compress_at_random(model, Candidate(*weights.split(":", 1)))
            model.save_pretrained(folder)
            for name, module in linear.items():
                model.set_submodule(name, module)
            files = sorted(Path(folder).glob("*.safetensors"))
            size = sum(file.stat().st_size for file in files) / 1e9
            for _ in range(PAIRS):
                read = seconds_of(["cat", *map(str, files)], files)
                verify = seconds_of([sys.executable, "-m", "semisparse.cli", "inspect", folder, "--verify"], files)
                figures = (options.arch, options.blocks, weights, f"{size:.2f}", f"{read:.2f}", f"{verify:.2f}")
                rows.append(dict(zip(COLUMNS, (*figures, f"{verify / read:.2f}"), strict=True)))
                print(rows[-1], flush=True)
                write_rows(options.out, rows, COLUMNS)


if __name__ == "__main__":
    main()
