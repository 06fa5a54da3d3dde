"""Storage of format ec_csr for real and random masks: the EC-SpMV paper's figures 5 and 9 and its table 2.

    python benchmarks/ec_csr.py DATA results/ec_csr_storage.csv [--plot deltas.png]

DATA is a directory with ``models/`` and ``text/``. A CSV row of pycode-11m sums over its linear layers (K of 384 and
1,024), pruned by SparseGPT. Matrices with K = 4,096 have Gaussian weights and random masks (``random``), masks of
SparseGPT as its authors published it (``sparsegpt-published``), or masks of this project's SparseGPT, which chooses
each mask repeatedly (``sparsegpt``; compress/prune/sparsegpt.py). In the last two the inputs are synthetic:
correlated, and each feature is scaled by exp(0.5 z) with z from a standard normal distribution. Rows that the CSV
already has are not measured again, so that an interrupted run continues. Bytes are those of all stored tensors;
``padding`` is the fraction of stored values that are zero. ``shared2``, ``shared4`` and ``shared8`` are the values,
padding included, that blocks of 2, 4 and 8 rows store per non-zero weight (layout ``paper``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from quality import PLAIN
from rows import read_rows, write_rows
from torch import Tensor
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.bench.roofline import random_weight
from semisparse.checkpoint import load_tokenizer, pick_device
from semisparse.compress import Recipe
from semisparse.compress.prune import Statistics, prune_layer
from semisparse.formats import Packed, get_format
from semisparse.patterns import parse_pattern

ZEROS = (50, 60, 70, 80, 90)
DTYPES = {"float16": torch.float16, "float32": torch.float32}
MASKS = ("pycode-11m", "random", "sparsegpt", "sparsegpt-published")
WAYS = {
    "ec_csr banks 4": {"layout": "banks", "delta_bits": 4},
    "ec_csr banks 8": {"layout": "banks", "delta_bits": 8},
    "ec_csr paper 4": {"layout": "paper", "delta_bits": 4},
    "ec_csr paper 8": {"layout": "paper", "delta_bits": 8},
    "ec_csr paper 8, 32": {"layout": "paper", "delta_bits": 8, "multiple": 32},
    "ec_csr paper 8, 1 row": {"layout": "paper", "delta_bits": 8, "granularity": 1},
}
"""Pack options of ec_csr by the name in column ``way``: ``banks`` is the stored name of row panels, ``paper`` that of
the EC-SpMV paper's layout. ``bitmask``, which is compared with them, has none."""
COLUMNS = (
    "masks",
    "zeros",
    "dtype",
    "way",
    "weights",
    "bytes",
    "of_dense",
    "of_csr32",
    "of_csr16",
    "padding",
    "shared2",
    "shared4",
    "shared8",
    "pack_seconds",
)
KEY = COLUMNS[:4]


def main() -> None:
    """Measure the rows that the CSV lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, metavar="DATA", help="a directory with models/ and text/")
    parser.add_argument("csv", type=Path, help="where rows are added")
    parser.add_argument("--rows", type=int, default=4096, help="rows of the matrices with K = 4,096")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--zeros", default=",".join(map(str, ZEROS)))
    parser.add_argument("--device", default="auto", help="the device on which weights are pruned and packed")
    parser.add_argument("--plot", type=Path, help="the PNG file for a plot of the column distances between non-zeros")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {tuple(row[key] for key in KEY) for row in rows}
    gaps: dict[str, Tensor] = {}
    for zeros in map(int, options.zeros.split(",")):
        for masks in options.masks.split(","):
            masks = masks if masks == "pycode-11m" else f"{masks} {options.rows}x4096"
            ways = ["bitmask", *WAYS]
            missing = [(d, w) for d in DTYPES for w in ways if (masks, str(zeros), d, w) not in done]
            if not missing and not options.plot:
                continue
            weights = masked(masks, options, zeros)
            gaps[f"{masks}, {zeros} %"] = gap_counts(weights)
            for dtype, way in missing:
                rows.append(measure(masks, zeros, dtype, way, weights))
                write_rows(options.csv, rows, COLUMNS)
                print(*(rows[-1][column] for column in COLUMNS), flush=True)
    print(table(rows))
    if options.plot:
        plot_gaps(gaps, options.plot)


def masked(masks: str, options: argparse.Namespace, zeros: int) -> list[Tensor]:
    """Return the weights with the masks of this name."""
    name = masks.split()[0]
    if name == "pycode-11m":
        return pruned(options, zeros)
    return [random_matrix(options, zeros) if name == "random" else sparsegpt_matrix(name, options, zeros)]


def sparsegpt_matrix(prune: str, options: argparse.Namespace, zeros: int) -> Tensor:
    """Return a Gaussian weight [rows, 4096] pruned by SparseGPT on synthetic inputs."""
    k, generator = 4096, torch.Generator().manual_seed(0)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    strength = (0.5 * torch.randn(k, generator=generator)).exp()
    x = torch.randn(2 * k, k, generator=generator) @ mixing * strength
    weight = torch.randn(options.rows, k, generator=generator)
    device = pick_device(options.device)
    statistics = Statistics((x.T @ x / len(x)).to(device))
    recipe = Recipe(prune=prune, refine="none")
    return prune_layer(weight.to(device), parse_pattern(f"{zeros}%"), statistics, recipe).weight


def random_matrix(options: argparse.Namespace, zeros: int) -> Tensor:
    """Return a random weight [rows, 4096], the same on every device."""
    weight = random_weight(parse_pattern(f"{zeros}%"), options.rows, 4096, torch.float32, "cpu")
    return weight.to(pick_device(options.device))


def pruned(options: argparse.Namespace, zeros: int) -> list[Tensor]:
    """Return the weights of pycode-11m pruned by SparseGPT, in float32."""
    directory = options.shared / "models" / "pycode-11m"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    semisparse.compress(
        model,
        load_tokenizer(directory),
        "ec-spmv",
        options.shared / "text" / "pycode-calib.txt",
        settings=("prune=sparsegpt", *PLAIN, "format=bitmask", f"pattern={zeros}%"),
        samples=options.samples,
        seqlen=512,
        device=options.device,
    )
    device = pick_device(options.device)
    return [layer.packed.unpack().float().to(device) for layer in model.modules() if hasattr(layer, "packed")]


def measure(masks: str, zeros: int, dtype: str, way: str, weights: list[Tensor]) -> dict[str, str]:
    """Pack every weight as ``way`` says; return a row with the sums over the weights."""
    kept = stored = padded = dense = csr32 = csr16 = 0
    shared = dict.fromkeys((2, 4, 8), 0.0)
    start = time.perf_counter()
    for weight in (w.to(DTYPES[dtype]) for w in weights):
        count = int(weight.count_nonzero())
        form = get_format("bitmask" if way == "bitmask" else "ec_csr")
        packed = form.pack(weight, f"{100 * (1 - (count + 1) / weight.numel()):.6f}%", **WAYS.get(way, {}))
        kept += count
        stored += packed.nbytes
        padded += packed.tensors["values"].numel() - count
        dense += weight.numel() * weight.element_size()
        csr32 += count * (4 + weight.element_size()) + 4 * (len(weight) + 1)
        csr16 += count * (2 + weight.element_size()) + 4 * (len(weight) + 1)
        for rows, in_blocks in block_weights(packed).items():
            shared[rows] += in_blocks
    figures = (kept, stored, stored / dense, stored / csr32, stored / csr16, padded / (kept + padded))
    figures += (*(shared[rows] / kept for rows in shared), time.perf_counter() - start)
    return dict(zip(COLUMNS, (masks, str(zeros), dtype, way, *map(_short, figures)), strict=True))


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"


def block_weights(packed: Packed) -> dict[int, int]:
    """Return how many values, padding included, blocks of 2, 4 and 8 rows store; {} unless the layout is ``paper``."""
    if packed.params.get("layout") != "paper":
        return {}
    table = packed.tensors["bundles"].long()
    return {rows: int(32 * rows * table[table[:, 0] == rows, 2].sum()) for rows in (2, 4, 8)}


def gap_counts(weights: list[Tensor]) -> Tensor:
    """Return a histogram [256] of the column distances between a row's non-zeros; the last bin is for 255 and more."""
    counts = torch.zeros(256, dtype=torch.int64)
    for weight in weights:
        row, column = weight.nonzero(as_tuple=True)
        gap = column.diff()[row.diff() == 0]
        counts += gap.clamp(max=255).bincount(minlength=256).cpu()
    return counts


def plot_gaps(gaps: dict[str, Tensor], path: Path) -> None:
    """Plot the cumulative distribution of the gaps, as in the paper's figure 5."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for name, counts in gaps.items():
        axes.plot(range(256), counts.cumsum(0) / counts.sum(), label=name)
    for limit in (15, 255):
        axes.axvline(limit, color="grey", linewidth=0.5)
    axes.set(xscale="log", xlabel="gap to the next column", ylabel="cumulative fraction of gaps")
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table per masks and dtype, with a line per way.

    A cell has the bytes relative to dense (to CSR with 32-bit columns), and the padding.
    """
    zeros = sorted({row["zeros"] for row in rows}, key=int)
    lines = []
    for masks, dtype in dict.fromkeys((row["masks"], row["dtype"]) for row in rows):
        lines += [f"| {masks}, {dtype} | {' | '.join(f'{z} %' for z in zeros)} |", "|---" * (1 + len(zeros)) + "|"]
        by_way = {(row["way"], row["zeros"]): row for row in rows if (row["masks"], row["dtype"]) == (masks, dtype)}
        for way in dict.fromkeys(way for way, _ in by_way):
            cells = [by_way.get((way, z)) for z in zeros]
            shown = [
                f"{float(c['of_dense']):.3f} ({float(c['of_csr32']):.3f}), {100 * float(c['padding']):.2f} %"
                if c
                else ""
                for c in cells
            ]
            lines.append(f"| {way} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
