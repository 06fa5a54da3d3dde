"""What loading a checkpoint takes, dense beside compressed: seconds, and host memory at its highest.

Run: python benchmarks/loading.py llama3.2-1b results/cpu/loading.csv [--format bitmask] [--pattern 32:64]
Each load is a process of its own, whose files are in the page cache; `memory_gb` is less what it held before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rows import write_rows
from transformers import PreTrainedModel

from semisparse.bench.model import make_sparse, random_model
from semisparse.bench.roofline import Candidate
from semisparse.checkpoint import describe
from semisparse.integrations.transformers import mark_compressed, sparse_layers

COLUMNS = ("model", "weights", "file_gb", "seconds", "memory_gb")

LOAD = """
import sys, time
import torch
import semisparse
from transformers import AutoModelForCausalLM
def held():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6
before, start = held(), time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for parameter in model.parameters():
    parameter.data.reshape(-1).view(torch.uint8)[::4096].sum()
print(time.perf_counter() - start, held() - before)
"""
"""Every page is read once at the end: safetensors maps the file, so that a dense model has nothing in memory before."""


def compress_at_random(model: PreTrainedModel, candidate: Candidate) -> None:
    """Put random packed weights into a model, as if it had been compressed."""
    make_sparse(model, candidate)
    layers = {name: describe(layer.packed) for name, layer in sparse_layers(model).items()}
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "layers": layers})


def load(directory: Path) -> dict[str, str]:
    """Load a directory in a new process, the second time for the figures."""
    for _ in range(2):
        told = subprocess.run([sys.executable, "-c", LOAD, str(directory)], capture_output=True, text=True, check=True)
    seconds, memory = map(float, told.stdout.split())
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return {"file_gb": f"{size / 1e9:.3f}", "seconds": f"{seconds:.2f}", "memory_gb": f"{memory:.3f}"}


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", default="bitmask")
    parser.add_argument("--pattern", default="32:64")
    options = parser.parse_args()
    candidate = Candidate(options.format, options.pattern)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(options.arch, torch.bfloat16, torch.device("cpu"))
        for label in ("dense", candidate.label):
            if label != "dense":
                compress_at_random(model, candidate)
            model.save_pretrained(Path(folder) / "model")
            rows.append({"model": options.arch, "weights": label} | load(Path(folder) / "model"))
            print(rows[-1])
    write_rows(options.out, rows, COLUMNS)


if __name__ == "__main__":
    main()
