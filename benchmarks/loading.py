"""Time and peak host memory of loading a checkpoint, dense beside every format.

Usage: python benchmarks/loading.py OUT.csv [--arch llama2-7b] [--blocks 8] [--weights bitmask:32:64,gqs:g16@50%,...]

The model has the architecture's first decoder layers with random weights. Each load runs in a new process.
`cold_seconds` is the time with the file dropped from the page cache, `seconds` with the file in it; each is the
fastest of several. `cpu_seconds` is the CPU time of the latter, `memory_gb` the process's peak memory less that before
the load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rows import write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.bench.model import make_sparse
from semisparse.bench.roofline import Candidate
from semisparse.bench.shapes import architecture
from semisparse.integrations.transformers import mark_compressed, sparse_layers
from semisparse.nn import is_linear

COLUMNS = ("model", "blocks", "weights", "file_gb", "cold_seconds", "seconds", "cpu_seconds", "memory_gb")

WEIGHTS = "bitmask:32:64,gqs:g16@50%,vector_nm:16:32v32,ec_csr:70%,slide24:6:8"

LOADS = 5
COLD_LOADS = 3

LOAD = """
import sys, time
import torch
import semisparse
from transformers import AutoModelForCausalLM
def held():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6
before, start, cpu = held(), time.perf_counter(), time.process_time()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for parameter in model.parameters():
    parameter.data.reshape(-1).view(torch.uint8)[::4096].sum()
print(time.perf_counter() - start, time.process_time() - cpu, held() - before)
"""
"""Loads a model and then reads every page once: safetensors maps the file, so that loading alone reads nothing."""


def compress_at_random(model: PreTrainedModel, candidate: Candidate) -> None:
    """Replace a model's layers by random packed weights, and make it save itself as a compressed model."""
    make_sparse(model, candidate)
    layers = {name: layer.packed.spec.to_dict() for name, layer in sparse_layers(model).items()}
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "layers": layers})


def load(directory: Path) -> dict[str, str]:
    """Return the CSV's figures for a directory, each load in a new process."""
    files = list(directory.glob("*.safetensors"))
    cold_seconds = []
    for _ in range(COLD_LOADS):
        for file in files:
            drop_from_cache(file)
        cold_seconds.append(load_once(directory)[0])
    seconds, cpu_seconds, memory = min([load_once(directory) for _ in range(1 + LOADS)][1:])
    return {
        "file_gb": f"{sum(file.stat().st_size for file in files) / 1e9:.3f}",
        "cold_seconds": f"{min(cold_seconds):.2f}",
        "seconds": f"{seconds:.2f}",
        "cpu_seconds": f"{cpu_seconds:.2f}",
        "memory_gb": f"{memory:.3f}",
    }


def load_once(directory: Path) -> tuple[float, float, float]:
    """Load a directory in a new process; return wall seconds, CPU seconds and memory in GB."""
    command = [sys.executable, "-c", LOAD, str(directory)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds, cpu_seconds, memory = map(float, output.split())
    return seconds, cpu_seconds, memory


def drop_from_cache(file: Path) -> None:
    """Drop a file from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not written yet would stay in the cache
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default=WEIGHTS, help="format:pattern, comma-separated")
    options = parser.parse_args()
    config = architecture(options.arch)
    config.num_hidden_layers = options.blocks
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    rows = []
    for weights in ("dense", *options.weights.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            if weights != "dense":
                compress_at_random(model, Candidate(*weights.split(":", 1)))
            model.save_pretrained(folder)
            rows.append({"model": options.arch, "blocks": options.blocks, "weights": weights, **load(Path(folder))})
        for name, module in linear.items():
            model.set_submodule(name, module)
        print(rows[-1])
        write_rows(options.out, rows, COLUMNS)  # after each row, so that an interrupted run keeps its rows


if __name__ == "__main__":
    main()
