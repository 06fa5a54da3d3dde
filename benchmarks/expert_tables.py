"""The tables of docs/kernels/experts.md, and the mixture's in docs/quality.md, from the CSV files in results/."""

from __future__ import annotations

from collections.abc import Mapping

from experts_layer import TOKENS, WAYS
from rows import markdown, result

Row = Mapping[str, str]

RIVAL = "humming int4 g128"
ROUTED = [*((str(tokens), "uniform") for tokens in TOKENS), *((str(tokens), "zipf") for tokens in TOKENS[1:])]


def _number(us: float) -> str:
    """Write microseconds with three digits."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _times() -> dict[tuple[str, ...], float]:
    """Return microseconds by way, tokens, routing and part, each with the kernel that is chosen for it."""
    chosen = (row for row in result("h200/experts.csv") if not row["schedule"])
    return {tuple(row[column] for column in ("way", "tokens", "routing", "part")): float(row["us"]) for row in chosen}


def _named(way: str) -> str:
    """Return a way's name for a table: the format as code."""
    form, _, rest = way.partition(" ")
    return f"`{form}` {rest}"


HEADER = ["", "1 token", *(f"{tokens}{', zipf' * (routing == 'zipf')}" for tokens, routing in ROUTED[1:])]


def experts() -> str:
    """Microseconds of the layer and in brackets of its two matmuls, by way, tokens and routing."""
    times = _times()
    names = {"grouped_mm": "transformers, `grouped_mm`"} | {way: _named(way) for way in WAYS} | {RIVAL: RIVAL}
    lines = []
    for way, name in names.items():
        cells = []
        for key in ROUTED:
            both = times.get((way, *key, "matmuls"))
            cells.append(_number(times[(way, *key, "layer")]) + (f" ({_number(both)})" if both else ""))
        lines.append([name, *cells])
    return markdown(HEADER, lines)


def experts_gain() -> str:
    """How many times as fast as transformers' layer and as humming's."""
    times = _times()
    lines = []
    for way in WAYS:
        ratios = (
            [times[(rival, *key, "layer")] / times[(way, *key, "layer")] for rival in ("grouped_mm", RIVAL)]
            for key in ROUTED
        )
        lines.append([_named(way), *(", ".join(f"{ratio:.2f}" for ratio in both) for both in ratios)])
    return markdown(HEADER, lines)


def mixture() -> str:
    """Loss and KL of the mixture and of the dense model, plain and tuned."""
    rows = {(r["model"], r["run"], r["tune"]): r for r in result("mixture.csv")}
    losses = {model: f"{float(rows[model, 'dense', 'none']['nll']):.3f}" for model in ("mixture", "mixture-dense")}
    lines = []
    for run in dict.fromkeys(run for _, run, _ in rows if run != "dense"):
        line = [run]
        for model in losses:
            found = [rows.get((model, run, tune)) for tune in ("none", "bqpo")]
            bits = next((f"{float(row['bits']):.2f}" for row in found if row), "")
            line += [bits, *(f"{float(row['kl']):.3f}" if row else "" for row in found)]
        lines.append(line)
    names = {"mixture": "mixture", "mixture-dense": "dense model"}
    header = [""]
    for model, loss in losses.items():
        header += [f"{names[model]} (loss {loss}): bits", "KL", "KL after `bqpo`"]
    return markdown(header, lines)


def mixture_experts() -> str:
    """Calibration tokens of each expert of the mixture, by decoder layer."""
    rows = [row for row in result("mixture_experts.csv") if row["layer"].endswith("gate_up")]
    by_layer: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["layer"]):
        by_layer.setdefault(row["layer"].split(".")[2], []).append(f"{int(row['tokens']):,}")
    lines = [[number, *counts] for number, counts in by_layer.items()]
    return markdown(["decoder layer", *(f"expert {index}" for index in range(len(lines[0]) - 1))], lines)


def experts_cpu() -> str:
    """Milliseconds of a layer on a CPU, and how many times as fast as the dense one, by dtype, way and tokens."""
    rows = result("cpu/experts.csv")
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        for way in dict.fromkeys(row["way"] for row in of_dtype):
            cells = [next(row for row in of_dtype if (row["way"], row["tokens"]) == (way, count)) for count in tokens]
            form, _, rest = way.partition(" ")
            times = [f"{float(row['us']) / 1000:,.1f} ({float(row['speedup']):.2f})" for row in cells]
            lines.append([f"`{form}` {rest}, {dtype}", *times])
    return markdown(["", "1 token", *tokens[1:]], lines)


TABLES = {
    "experts-cpu": experts_cpu,
    "experts": experts,
    "experts-gain": experts_gain,
    "mixture": mixture,
    "mixture-experts": mixture_experts,
}
