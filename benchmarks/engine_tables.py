"""The tables of docs/experiments/blocks.md: decoder blocks in the engine, and every number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rows import markdown, result

Row = Mapping[str, str]

NAMES = {
    "dense": "dense bfloat16",
    "bitmask": "bitmask 32:64",
    "gqs": "gqs W4, g16@50%",
    "vector_nm": "vector_nm 16:32v32",
    "ec_csr": "ec_csr 70%",
}
BATCHES = ("1", "2", "4", "8", "16", "32", "64", "128")
PROMPTS = ("128", "256", "512", "1024", "2048", "4096", "8192")


def by_work(file: str, blocks: str = "8") -> dict[tuple[str, str, str], float]:
    """Return the microseconds by weights, work and count."""
    rows = [row for row in result(file) if row["blocks"] == blocks]
    return {(row["weights"], row["work"], row["count"]): float(row["us"]) for row in rows}


def beside_dense(file: str, work: str, counts: Sequence[str], first: str) -> str:
    """Milliseconds of a work by count; in brackets relative to dense."""
    found, lines = by_work(file), []
    counts = [count for count in counts if ("dense", work, count) in found]
    for weights, name in NAMES.items():
        if (weights, work, counts[0]) in found:
            times = [found[weights, work, count] for count in counts]
            shares = [time / found["dense", work, count] for time, count in zip(times, counts, strict=True)]
            cells = [f"{time / 1e3:.2f}" for time in times]
            if weights != "dense":
                cells = [f"{cell} ({share:.2f})" for cell, share in zip(cells, shares, strict=True)]
            lines.append([name, *cells])
    return markdown((first, *(f"{int(count):,}" for count in counts)), lines)


def steps() -> str:
    """Decode steps of 8 blocks by batch."""
    return beside_dense("h200/blocks.csv", "step", BATCHES, "batch")


def prompts() -> str:
    """Captured prompts of 8 blocks by length."""
    return beside_dense("h200/blocks.csv", "prompt", PROMPTS, "tokens, captured")


def launched() -> str:
    """Prompts of 8 blocks, launched from Python, by length."""
    return beside_dense("h200/blocks.csv", "eager", PROMPTS, "tokens, launched from Python")


TABLES = {"blocks-steps": steps, "blocks-prompts": prompts, "blocks-launched": launched}
