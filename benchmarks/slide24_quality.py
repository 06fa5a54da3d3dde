"""What `slide24` keeps of a real model, by pattern and rounding, beside dense: one CSV row a run, and a table.

    python benchmarks/slide24_quality.py ../shared results/slide24_quality.csv --device cuda

The first argument holds ``models/`` and ``text/``. Rows that the CSV has already are kept, so that an interrupted run
goes on. Pruned by SparseGPT with its gains on the ``calib`` text, measured on the ``eval`` text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pruners import MODELS
from rows import read_rows, write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

import semisparse
from semisparse.evaluate import measure_quality
from semisparse.integrations.loading import load, load_tokenizer, pick_device
from semisparse.text import token_chunks

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
KINDS = ("none", "int8", "fp8")
COLUMNS = ("model", "pattern", "quant", "nll", "kl", "dense_nll", "tokens", "samples", "seed", "device")


def main() -> None:
    """Run what the CSV lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--model", default="pycode-11m", choices=MODELS)
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--samples", type=int, help="calibration sequences; by default those of `compress`")
    parser.add_argument("--chunks", type=int, help="of the eval text; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {(row["model"], row["pattern"], row["quant"]) for row in rows}
    _, held_out, seqlen = MODELS[options.model]
    directory = options.shared / "models" / options.model
    chunks = token_chunks(load_tokenizer(directory), options.shared / "text" / held_out, seqlen)[: options.chunks]
    dense = load(directory, options.device, torch.float32)
    dense_nll = measure_quality(dense, chunks).nll
    for pattern in options.patterns.split(","):
        for kind in options.kinds.split(","):
            if (options.model, pattern, kind) in done:
                continue
            found = measure_quality(compressed(directory, pattern, kind, options), chunks, dense)
            samples = options.samples or "default"
            key = (options.model, pattern, kind, found.nll, found.kl, dense_nll, found.tokens, samples, options.seed)
            rows.append(dict(zip(COLUMNS, map(str, (*key, pick_device(options.device).type)), strict=True)))
            write_rows(options.csv, rows, COLUMNS)
            print(*rows[-1].values(), flush=True)
    print(table([row for row in rows if row["model"] == options.model]))


def compressed(directory: Path, pattern: str, kind: str, options: argparse.Namespace) -> PreTrainedModel:
    """Compress the model, in the dtype that its kernels take on the device: float32 on a CPU."""
    calibration, _, seqlen = MODELS[options.model]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    semisparse.compress(
        model,
        load_tokenizer(directory),
        "slidesparse",
        options.shared / "text" / calibration,
        settings=(f"pattern={pattern}", f"quant={kind}"),
        samples=options.samples,
        seqlen=seqlen,
        device=options.device,
        seed=options.seed,
    )
    device = pick_device(options.device)
    return (model.float() if device.type == "cpu" else model.bfloat16()).to(device)


def table(rows: list[dict[str, str]]) -> str:
    """Write loss and KL as Markdown: a row a pattern, a column a kind."""
    kinds = list(dict.fromkeys(row["quant"] for row in rows))
    cells = {(r["pattern"], r["quant"]): f"{float(r['nll']):.3f} / {float(r['kl']):.3f}" for r in rows}
    head = f"| {rows[0]['model']} (dense {float(rows[0]['dense_nll']):.3f})"
    lines = [f"{head} | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        lines.append(f"| {pattern} | {' | '.join(cells.get((pattern, kind), '') for kind in kinds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
