"""Squared error of 4 and 8 bits by group size, zero point and sign of the scale: one CSV row per scheme.

    python benchmarks/bitmask_codes.py DATA results/bitmask_codes.csv

DATA is a directory with ``models/``. Each linear layer whose K is a multiple of 128 is pruned by magnitude and rounded
to nearest; the error is relative to the pruned weight's square, a mean over the layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import torch
from rows import write_rows
from safetensors.torch import load_file
from torch import Tensor

from semisparse.patterns import parse_pattern
from semisparse.quant.group import scales_of

COLUMNS = ("model", "pattern", "bits", "group", "scheme", "bits_per_weight", "error")

DTYPE = torch.float16
"""The dtype of the scales."""


def main() -> None:
    """Measure all schemes on two models and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="a directory with models/")
    parser.add_argument("csv", type=Path, help="the output")
    options = parser.parse_args()
    rows = []
    for model in ("babyllama-1m", "pycode-11m"):
        files = sorted((options.shared / "models" / model).glob("*.safetensors"))
        tensors = [item for file in files for item in load_file(file).items()]
        weights = [w.float() for name, w in tensors if "_proj.weight" in name and w.shape[1] % 128 == 0]
        rows += [row for written in ("16:64", "32:64") for row in measure(model, written, weights)]
    write_rows(options.csv, rows, COLUMNS)
    for row in rows:
        print(*row.values())


def measure(model: str, written: str, weights: list[Tensor]) -> list[dict[str, str]]:
    """Return a row per scheme."""
    pattern, rows = parse_pattern(written), []
    pruned = [w * pattern.mask(w.abs()) for w in weights]
    for bits in (8, 4):
        for size in (64, 128):
            for scheme in ("zero point", "positive scale", "signed scale"):
                errors = [(rounded(w, bits, size, scheme) - w).square().sum() / w.square().sum() for w in pruned]
                metadata = (24 if scheme == "zero point" else 16) / size
                stored = 1 + pattern.density * bits + metadata
                values = (model, written, bits, size, scheme, stored, f"{mean(map(float, errors)):.3e}")
                rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return rows


def rounded(weight: Tensor, bits: int, size: int, scheme: str) -> Tensor:
    """Round a pruned weight to nearest; what was pruned stays zero in every scheme."""
    if scheme == "positive scale":
        groups, middle = weight.unflatten(1, (-1, size)), 2 ** (bits - 1)
        scale = torch.maximum(groups.amax(-1) / (middle - 1), -groups.amin(-1) / middle).to(DTYPE).float()[..., None]
        scale = scale.masked_fill(scale == 0, 1)
        return ((groups / scale).round().clamp(-middle, middle - 1) * scale).flatten(1)
    scales = scales_of(weight, bits, size, DTYPE, symmetric=scheme == "signed scale")
    return scales.rounded(weight).float() * (weight != 0)


if __name__ == "__main__":
    main()
