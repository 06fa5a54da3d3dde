"""What format ec_csr stores on real and random masks: the EC-SpMV paper's figures 5 and 9 and its table 2.

    python benchmarks/ec_csr.py ../shared results/ec_csr_storage.csv [--plot deltas.png]

The first argument holds ``models/`` and ``text/``. Real masks are those of pycode-11m pruned by SparseGPT, its layers
summed; random ones are 4,096 wide. Rows that the CSV has already are kept, so that an interrupted run goes on. Bytes
are of all stored tensors; ``padding`` is the share of stored values that are zero; ``shared2``, ``shared4``,
``shared8`` are the shares of the weights in blocks of 2, 4 and 8 rows (layout ``paper``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from pruners import PLAIN
from rows import read_rows, write_rows
from torch import Tensor
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.bench.roofline import random_weight
from semisparse.formats import Packed, get_format
from semisparse.checkpoint import load_tokenizer, pick_device
from semisparse.patterns import parse_pattern

ZEROS = (50, 60, 70, 80, 90)
DTYPES = {"float16": torch.float16, "float32": torch.float32}
WAYS = {
    "ec_csr banks 4": {"layout": "banks", "delta_bits": 4},
    "ec_csr banks 8": {"layout": "banks", "delta_bits": 8},
    "ec_csr paper 4": {"layout": "paper", "delta_bits": 4},
    "ec_csr paper 8": {"layout": "paper", "delta_bits": 8},
    "ec_csr paper 8, 32": {"layout": "paper", "delta_bits": 8, "multiple": 32},
    "ec_csr paper 8, 1 row": {"layout": "paper", "delta_bits": 8, "granularity": 1},
}
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
    """Measure what the CSV lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--rows", type=int, default=4096, help="of the random matrices")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--zeros", default=",".join(map(str, ZEROS)))
    parser.add_argument("--device", default="auto", help="where weights are pruned and packed")
    parser.add_argument("--plot", type=Path, help="draw the distribution of the gaps between columns there")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {tuple(row[key] for key in KEY) for row in rows}
    gaps: dict[str, Tensor] = {}
    for zeros in map(int, options.zeros.split(",")):
        for masks in ("pycode-11m", f"random {options.rows}x4096"):
            ways = ["bitmask", *WAYS]
            missing = [(d, w) for d in DTYPES for w in ways if (masks, str(zeros), d, w) not in done]
            if not missing and not options.plot:
                continue
            weights = pruned(options, zeros) if masks == "pycode-11m" else [random_matrix(options, zeros)]
            gaps[f"{masks}, {zeros} %"] = gap_counts(weights)
            for dtype, way in missing:
                rows.append(measure(masks, zeros, dtype, way, weights))
                write_rows(options.csv, rows, COLUMNS)
                print(*(rows[-1][column] for column in COLUMNS), flush=True)
    print(table(rows))
    if options.plot:
        plot_gaps(gaps, options.plot)


def random_matrix(options: argparse.Namespace, zeros: int) -> Tensor:
    """Draw a weight [rows, 4096], the same for every device."""
    weight = random_weight(parse_pattern(f"{zeros}%"), options.rows, 4096, torch.float32, "cpu")
    return weight.to(pick_device(options.device))


def pruned(options: argparse.Namespace, zeros: int) -> list[Tensor]:
    """Prune pycode-11m by SparseGPT and give its weights in float32."""
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
    place = pick_device(options.device)
    return [layer.packed.unpack().float().to(place) for layer in model.modules() if hasattr(layer, "packed")]


def measure(masks: str, zeros: int, dtype: str, way: str, weights: list[Tensor]) -> dict[str, str]:
    """Pack every weight in one way and add up."""
    kept = stored = padded = size = csr = narrow = 0
    shared = dict.fromkeys((2, 4, 8), 0.0)
    start = time.perf_counter()
    for weight in (w.to(DTYPES[dtype]) for w in weights):
        count = int(weight.count_nonzero())
        form = get_format("bitmask" if way == "bitmask" else "ec_csr")
        packed = form.pack(weight, f"{100 * (1 - (count + 1) / weight.numel()):.6f}%", **WAYS.get(way, {}))
        kept += count
        stored += packed.nbytes
        padded += packed.tensors["values"].numel() - count
        size += weight.numel() * weight.element_size()
        csr += count * (4 + weight.element_size()) + 4 * (len(weight) + 1)
        narrow += count * (2 + weight.element_size()) + 4 * (len(weight) + 1)
        for rows, weights_in in block_weights(packed).items():
            shared[rows] += weights_in
    found = (kept, stored, stored / size, stored / csr, stored / narrow, padded / (kept + padded))
    found += tuple(shared[rows] / kept for rows in shared)
    return dict(
        zip(COLUMNS, (masks, str(zeros), dtype, way, *map(_short, (*found, time.perf_counter() - start))), strict=True)
    )


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"


def block_weights(packed: Packed) -> dict[int, int]:
    """Count the weights of the layout ``paper`` in blocks of 2, 4 and 8 rows."""
    if packed.params.get("layout") != "paper":
        return {}
    table = packed.tensors["bundles"].long()
    return {rows: int(32 * rows * table[table[:, 0] == rows, 2].sum()) for rows in (2, 4, 8)}


def gap_counts(weights: list[Tensor]) -> Tensor:
    """Count the gaps between neighbouring columns by their width, [256], the last for all from 255 on."""
    counts = torch.zeros(256, dtype=torch.int64)
    for weight in weights:
        row, column = weight.nonzero(as_tuple=True)
        gap = column.diff()[row.diff() == 0]
        counts += gap.clamp(max=255).bincount(minlength=256).cpu()
    return counts


def plot_gaps(gaps: dict[str, Tensor], path: Path) -> None:
    """Draw the cumulative distribution of the gaps, as the paper's figure 5."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for name, counts in gaps.items():
        axes.plot(range(256), counts.cumsum(0) / counts.sum(), label=name)
    for limit in (15, 255):
        axes.axvline(limit, color="grey", linewidth=0.5)
    axes.set(xscale="log", xlabel="gap to the next column", ylabel="share of gaps, at most so wide")
    axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def table(rows: list[dict[str, str]]) -> str:
    """Write bytes relative to dense (to CSR-32) and padding as Markdown, one line a way."""
    zeros = sorted({row["zeros"] for row in rows}, key=int)
    lines = []
    for masks, dtype in dict.fromkeys((row["masks"], row["dtype"]) for row in rows):
        lines += [f"| {masks}, {dtype} | {' | '.join(f'{z} %' for z in zeros)} |", "|---" * (1 + len(zeros)) + "|"]
        chosen = {(row["way"], row["zeros"]): row for row in rows if (row["masks"], row["dtype"]) == (masks, dtype)}
        for way in dict.fromkeys(way for way, _ in chosen):
            cells = [chosen.get((way, z)) for z in zeros]
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
