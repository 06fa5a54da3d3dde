"""What each pruner loses on real models, by pattern: one CSV row a run, and the README's table.

    python benchmarks/pruners.py ../shared results/pruners.csv --readme README.md

The first argument holds ``models/`` and ``text/``. Rows that the CSV has already are kept, so that an interrupted run
goes on. Calibrated on the ``calib`` text, measured on all of the ``eval`` text, in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from rows import read_rows, write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import semisparse
from semisparse.evaluate import measure_quality
from semisparse.integrations.loading import load, load_tokenizer, pick_device
from semisparse.text import token_chunks

MODELS = {
    "stories260k": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 512),
    "babyllama-1m": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 256),
    "pycode-11m": ("pycode-calib.txt", "pycode-eval.txt", 512),
}
PATTERNS = ("2:4", "4:8", "6:8", "32:64", "50%")
PLAIN = ("refine=none", "order=columns", "target=local")
METHODS: dict[str, tuple[str, ...]] = {
    "magnitude": ("prune=magnitude",),
    "wanda": ("prune=wanda",),
    "sparsegpt": ("prune=sparsegpt", *PLAIN),
    "sparsegpt + gains": ("prune=sparsegpt",),
}
COLUMNS = ("model", "pattern", "method", "nll", "kl", "dense_nll", "tokens", "samples", "seed", "device")


def main() -> None:
    """Run what the CSV lacks, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--readme", type=Path, help="replace the table between its markers")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--samples", type=int, help="calibration sequences; by default those of `compress`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {(row["model"], row["pattern"], row["method"]) for row in rows}
    for name in options.models.split(","):
        missing = [(p, m) for p in options.patterns.split(",") for m in METHODS if (name, p, m) not in done]
        for row in measure(name, missing, options):
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*(row[column] for column in COLUMNS), flush=True)
    if options.readme:
        replace_table(options.readme, table(rows))


def measure(name: str, runs: list[tuple[str, str]], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Compress and evaluate one model in several ways."""
    if not runs:
        return
    calibration, held_out, seqlen = MODELS[name]
    directory, text = options.shared / "models" / name, options.shared / "text"
    device = pick_device(options.device)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(directory)
    dense = load(directory, options.device, torch.float32)
    chunks = token_chunks(tokenizer, text / held_out, seqlen)
    dense_nll = measure_quality(dense, chunks).nll
    for pattern, method in runs:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        settings = (f"pattern={pattern}", "format=bitmask", "search=none", *METHODS[method])
        semisparse.compress(
            model,
            tokenizer,
            "rheosparse",
            text / calibration,
            settings=settings,
            samples=options.samples,
            seqlen=seqlen,
            device=options.device,
            seed=options.seed,
        )
        found = measure_quality(model.float().to(device), chunks, dense)
        values = (
            name,
            pattern,
            method,
            found.nll,
            found.kl,
            dense_nll,
            found.tokens,
            options.samples or "default",
            options.seed,
        )
        yield dict(zip(COLUMNS, map(str, (*values, device.type)), strict=True))


def table(rows: list[dict[str, str]]) -> str:
    """Write loss and KL of every model, method and pattern as Markdown."""
    lines = []
    for model in MODELS:
        of_model = {(row["pattern"], row["method"]): row for row in rows if row["model"] == model}
        if not of_model:
            continue
        dense = float(next(iter(of_model.values()))["dense_nll"])
        lines += [f"| {model} (dense {dense:.3f}) | {' | '.join(PATTERNS)} |", "|---" * (1 + len(PATTERNS)) + "|"]
        for method in METHODS:
            cells = [
                f"{float(row['nll']):.3f} / {float(row['kl']):.3f}" if (row := of_model.get((p, method))) else ""
                for p in PATTERNS
            ]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def replace_table(readme: Path, content: str) -> None:
    """Put the table between the README's markers."""
    start, end = "<!-- pruners: begin -->", "<!-- pruners: end -->"
    text = readme.read_text()
    before, after = text.index(start) + len(start), text.index(end)
    readme.write_text(f"{text[:before]}\n{content}\n{text[after:]}")


if __name__ == "__main__":
    main()
