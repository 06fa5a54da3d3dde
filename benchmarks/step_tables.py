"""The tables of docs/experiments/decode-step.md: kernels of the captured decode step, and the command `generate`."""

from __future__ import annotations

from functools import partial
from statistics import median

from engine_tables import NAMES
from rows import markdown, result

BYTES_PER_US = 4.33e6
"""The H200's read bandwidth: 4.33 TB/s."""

PARTS = {"qkv": "q, k, v", "attention": "attention", "o": "o", "gate_up": "gate, up", "down": "down"}
OTHERS = {"rms_norm": "norms", "silu_mul": "SiLU", "indexSelect": "embedding", "gather": "embedding", "nvjet": "head"}
OTHERS |= {"dense_decode": "head", "permute_x": "permuting x", "splitKreduce": "sums of split-K"}
ONCE = ("embedding", "head", "next token")

ASKED = {"dense": "3.7", "bitmask": "2.3", "ec_csr": "2.1", "vector_nm": "2.2", "gqs-w4s50": "1.3"}
"""Milliseconds per token that were asked for, at one sequence."""


def _part(row: dict[str, str]) -> str:
    if "attention" in row["kernel"]:
        return "attention"
    if "greedy" in row["kernel"]:
        return "next token"
    if row["part"] in PARTS:
        return PARTS[row["part"]]
    return next(name for text, name in OTHERS.items() if text in row["kernel"])


def kernels(batch: str) -> str:
    """Microseconds that a layer's kernels add to a step, by part; in brackets the weight's bytes over bandwidth.

    ec_csr has no brackets: its bytes are those of two layouts, and a kernel reads one.
    """
    file = "h200/decode-step-32.csv" if batch == "32" else "h200/decode-step-formats.csv"
    rows = [row for row in result(file) if row["batch"] == batch]
    if batch == "1":
        rows = [{**row, "batch": "1"} for row in result("h200/decode-step.csv") if row["weights"] == "dense"] + rows
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    lines = []
    for part in (*PARTS.values(), "sums of split-K", "permuting x", "norms", "SiLU", *ONCE):
        cells = []
        for name in formats:
            found = [row for row in rows if row["weights"] == name and _part(row) == part]
            if part == "norms":  # the head's own norm is once per step
                found = [row for row in found if row["part"] != "outside"]
            added = sum(float(row["added_us"]) for row in found)
            floor = sum(float(row["weight_mb"]) for row in found) * 1e6 / BYTES_PER_US
            bracket = f" ({floor:.1f})" if floor and name != "ec_csr" else ""
            cells.append(f"{added:.1f}{bracket}" if found else "")
        if any(cells):
            lines.append([f"once per step: {part}" if part in ONCE else part, *cells])
    return markdown(("", *(NAMES[name] for name in formats)), lines)


def attention(batch: str) -> str:
    """Microseconds of a step of 8 layers by attention's schedule and weights; in brackets attention, per layer."""
    rows = [row for row in result("h200/sweeps/attention.csv") if row["batch"] == batch]
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        found = {row["weights"]: row for row in rows if row["variant"] == variant}
        cells = [
            f"{float(found[name]['step_us']):.0f}"
            + (f" ({float(found[name]['attention_us']):.1f})" if found[name]["attention_us"] else "")
            for name in formats
        ]
        lines.append([variant, *cells])
    return markdown(("", *(NAMES[name] for name in formats)), lines)


def commands() -> str:
    """What `generate` takes by weights, in its latest call."""
    latest = {row["weights"]: row for row in result("h200/generate.csv") if row["generate_ms_per_token"]}
    first = float(latest["dense"]["first_token_ms"])
    lines = []
    for weights, asked in ASKED.items():
        row = latest[weights]
        times = [row["generate_ms_per_token"], asked, row["captured_ms_per_token"], row["first_token_ms"]]
        over = f"{float(row['first_token_ms']) / first:.2f}"
        lines.append([NAMES[weights.split("-")[0]], *times, over, row["call"]])
    head = ("ms per token", "asked", "captured step", "first token, ms", "over dense's", "call")
    return markdown(("", *head), lines)


def starts() -> str:
    """Seconds of a start by weights: reading, the first one, one that compiles kernels alone, and the later ones."""
    rows = result("h200/start-runs.csv")
    lines = []
    for weights, call in dict.fromkeys((row["weights"], row["call"]) for row in rows):
        mine = [row for row in rows if (row["weights"], row["call"]) == (weights, call)]
        of = {kind: [row for row in mine if row["start"] == kind] for kind in ("first", "kernels", "later")}
        later = of["later"]
        if not later:
            continue
        whole, beyond, read = (
            median(float(row[key]) for row in later) for key in ("wall_seconds", "beyond_reading", "read_seconds")
        )
        more = [
            f"{float(of[kind][0]['wall_seconds']) - whole:.1f}" if of[kind] else "" for kind in ("first", "kernels")
        ]
        gigabytes = later[0]["gigabytes"]
        cells = [gigabytes, f"{read:.2f}", f"{whole:.2f}", f"{beyond:.2f}", *more, later[0]["cores"], call]
        lines.append([NAMES[weights.split("-")[0]], *cells])
    head = (
        "GB",
        "read",
        "later start",
        "beyond reading",
        "first start: more",
        "kernels compiled: more",
        "cores",
        "call",
    )
    return markdown(("", *head), lines)


TABLES = {
    "step-kernels": partial(kernels, "1"),
    "step-kernels-8": partial(kernels, "8"),
    "step-kernels-32": partial(kernels, "32"),
    "attention-schedules": partial(attention, "1"),
    "attention-schedules-8": partial(attention, "8"),
    "generate-command": commands,
    "starts": starts,
}
