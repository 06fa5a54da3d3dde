"""The tables of docs/performance.md and README.md: times from results/cpu and results/h200."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from engine_tables import NAMES
from joint_tables import latest_runs
from rows import markdown, result

Row = Mapping[str, str]

SHAPES = (("4096", "4096"), ("11008", "4096"), ("4096", "11008"), ("28672", "8192"))
LARGE = ("28672", "8192")
GQS_SHAPES = (SHAPES[0], LARGE)
FEW, MANY = ("1", "8", "16"), ("64", "256", "1024", "4096")

WEIGHTS = {
    "bitmask 32:64": ("bitmask", "32:64", ""),
    "vector_nm 16:32v32": ("vector_nm", "16:32v32", ""),
    "ec_csr 70%": ("ec_csr", "70%", ""),
    "gqs W4, g16@50%": ("gqs", "g16@50%", "w4"),
    "gqs W4A8, g16@50%": ("gqs", "g16@50%", "w4a8"),
    "dense int8": ("dense", "0%", "int8"),
    "dense fp8": ("dense", "0%", "fp8"),
}
"""Format, pattern and kind by the name in the table."""

OLDER = {(form, m) for form in ("gqs", "vector_nm") for m in ("64", "256")}
"""Cells of kernels-bfloat16.csv that are older than a kernel for them: `TUNED` has its times."""


def _kind(row: Row) -> str:
    return str(json.loads(row["options"])["kind"]) if row["options"] else ""


def best_us(rows: Iterable[Row]) -> dict[tuple[str, str, str, str, str, str], float]:
    """Return the time of the fastest kernel by N, K, M, format, pattern and kind."""
    times: dict[tuple[str, str, str, str, str, str], float] = {}
    for row in rows:
        key = (row["n"], row["k"], row["m"], row["format"], row["pattern"], _kind(row))
        times[key] = min(times.get(key, float("inf")), float(row["us"]))
    return times


def cpu_layers() -> str:
    """Milliseconds of `bitmask` 32:64 and dense, by shape, tokens and dtype."""
    times = {dtype: best_us(result(f"cpu/kernels-{dtype}.csv")) for dtype in ("bfloat16", "float32")}
    lines = []
    for n, k in (("4096", "4096"), ("11008", "4096")):
        for m in ("1", "4", "16"):
            cells = [
                f"{table[n, k, m, 'bitmask', '32:64', ''] / 1e3:.2f} / {table[n, k, m, 'dense', '0%', ''] / 1e3:.2f}"
                for table in times.values()
            ]
            lines.append([f"{n} x {k}", m, *cells])
    return markdown(("N x K", "tokens", "bfloat16, sparse / dense", "float32, sparse / dense"), lines)


def ec_csr_speedups(m: str) -> list[float]:
    """Return `ec_csr`'s speed-ups over dense at `SHAPES`: kernels-float16.csv is older than its mask tiles."""
    rows = result("h200/every-token-ec_csr.csv")
    times = {(row["n"], row["k"], row["weights"]): float(row["us"]) for row in rows if row["m"] == m}
    return [times[n, k, "dense"] / times[n, k, "ec_csr 70%"] for n, k in SHAPES if (n, k, "dense") in times]


def gpu_layers() -> str:
    """Ranges over `SHAPES` of the speed-up over dense, by weights and tokens."""
    times = {m: best_us(result("h200/kernels-float16.csv")) for m in FEW}
    times |= {m: best_us(result("h200/kernels-bfloat16.csv")) for m in MANY}
    lines = []
    for name, weights in WEIGHTS.items():
        cells = []
        for m, table in times.items():
            ups = [
                table[n, k, m, "dense", "0%", ""] / table[(n, k, m, *weights)]
                for n, k in SHAPES
                if (n, k, m, *weights) in table and (weights[0], m) not in OLDER
            ]
            if weights[0] == "ec_csr":
                ups = ec_csr_speedups(m)
            cells.append(f"{min(ups):.2f}-{max(ups):.2f}" if ups else "")
        lines.append([name, *cells])
    return markdown(("weights", *(f"{int(m):,}" for m in times)), lines)


TUNED = "../semisparse/formats/tables/nvidia-h200.csv"  # from results/

GQS_ROWS = {
    "W4, half of the groups of 16": ("g16@50%", "w4", "bfloat16"),
    "W4, groups of 128": ("g128@0%", "w4", "bfloat16"),
    "W2, groups of 64": ("g64@0%", "w2", "bfloat16"),
}
"""Pattern, kind and dtype by the name in the table."""


def gqs_times() -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """Return the times of the fastest `gqs` kernel and of cuBLAS for `GQS_SHAPES`, by N, M, pattern and kind."""
    times: dict[tuple[str, str, str, str], tuple[float, float]] = {}
    for row in result(TUNED):
        kinds = [(pattern, kind) for pattern, kind, dtype in GQS_ROWS.values() if dtype == row["dtype"]]
        if row["format"] == "gqs" and (row["pattern"], row["variant"]) in kinds and (row["n"], row["k"]) in GQS_SHAPES:
            key = (row["n"], row["m"], row["pattern"], row["variant"])
            found = (float(row["us"]), float(row["dense_us"]))
            times[key] = min(times.get(key, found), found)
    return times


def gqs_few() -> str:
    """Microseconds of `gqs` for 1 to 256 tokens, over those of cuBLAS beside it."""
    times = gqs_times()
    counts = ("1", "8", "32", "64", "128", "256")
    lines = []
    for n, k in GQS_SHAPES:
        for name, (pattern, kind, _) in GQS_ROWS.items():
            cells = [times.get((n, m, pattern, kind)) for m in counts]
            shown = ["" if cell is None else f"{cell[0]:.1f} / {cell[1]:.1f}" for cell in cells]
            lines.append([f"{n} x {k}: {name}", *shown])
    return markdown(("gqs / dense 16 bits", *counts), lines)


def slide24_int8() -> str:
    """Speed-up of `slide24` in int8 over dense bfloat16 and over the best dense 8-bit layers, summed over a model."""
    times = best_us(result("h200/slide24-int8.csv"))
    shapes = dict.fromkeys((n, k) for n, k, *_ in times)
    counts = ("64", "1024", "4096", "8192")

    def total(m: str, form: str, pattern: str, kinds: tuple[str, ...]) -> float:
        choices = [[times.get((n, k, m, form, pattern, kind)) for kind in kinds] for n, k in shapes]
        return sum(min(us for us in choice if us is not None) for choice in choices)

    lines = []
    for pattern in ("2:4", "4:6", "6:8", "8:10"):
        cells = []
        for m in counts:
            sparse = total(m, "slide24", pattern, ("int8",))
            sixteen = total(m, "dense", "0%", ("",))
            eight = total(m, "dense", "0%", ("int8", "fp8", "fp8_tensor"))
            cells.append(f"{sixteen / sparse:.2f} / {eight / sparse:.2f}")
        lines.append([pattern, *cells])
    return markdown(("pattern", *(f"{int(m):,}" for m in counts)), lines)


def engine() -> str:
    """`generate` of a whole model, in its latest call: first token, decode and weights."""
    latest = {row["weights"]: row for row in result("h200/generate.csv") if row["generate_ms_per_token"]}
    lines = []
    for weights, name in NAMES.items():
        row = next(row for of, row in latest.items() if of.split("-")[0] == weights)
        per_token = float(row["generate_ms_per_token"])
        times = [row["first_token_ms"], f"{per_token:.2f}", f"{1e3 / per_token:.0f}"]
        lines.append([name, *times, f"{float(row['gigabytes']):.1f}"])
    return markdown(("weights", "first token, ms", "ms per token", "tokens per second", "files, GB"), lines)


README_ROWS: tuple[tuple[str, str, tuple[str, str, str] | None], ...] = (
    ("dense 16 bits (cuBLAS)", "", ("dense", "0%", "")),
    ("dense fp8, a scale per row", "", ("dense", "0%", "fp8")),
    ("dense W4, groups of 128", "W4 g128", ("gqs", "g128@0%", "w4")),
    ("`--target bits=4.5`", "auto 4.5", None),
    ("dense W3, groups of 64", "W3 g64", None),
    ("`--target bits=3.5`", "auto 3.5", None),
    ("`--target bits=3.0`", "auto 3.0", None),
    ("dense W2, groups of 32", "W2 g32", None),
    ("W4, half of the groups of 16 dropped (GQSA)", "W4S50", ("gqs", "g16@50%", "w4")),
    ("32:64 in 16 bits (RheoSparse)", "32:64", ("bitmask", "32:64", "")),
)
"""Name, run of joint.csv, and format, pattern and kind of the layer that was timed."""


def readme() -> str:
    """Bits and KL of a tuned model, and microseconds of a layer on an H200, by weights."""
    measured = [*result("h200/kernels-float16.csv"), *result("h200/kernels-bfloat16.csv")]
    stored = {(row["format"], row["pattern"], _kind(row)): float(row["bits_per_weight"]) for row in measured}
    table = best_us(measured)
    tuned: dict[tuple[str, str, str, str, str, str], float] = {}
    for row in result(TUNED):  # beside cuBLAS of the same run
        if (row["n"], row["k"]) == LARGE and row["dtype"] == "bfloat16":
            key = (*LARGE, row["m"], row["format"], row["pattern"], row["variant"])
            tuned[key] = min(tuned.get(key, float("inf")), float(row["us"]))
            if key[3:5] == ("gqs", "g16@50%"):
                tuned[(*LARGE, row["m"], "dense", "0%", "")] = float(row["dense_us"])
    table |= tuned
    lines = []
    for name, run, weights in README_ROWS:
        times = [table.get((*LARGE, m, *weights)) if weights else None for m in ("1", "64", "4096")]
        bits = joint_mean(run, "bits") if run or weights is None else stored[weights]
        kl = f"{joint_mean(run, 'kl'):.3f}" if run else "0" if weights == ("dense", "0%", "") else ""
        lines.append([name, f"{bits:.1f}", kl, *("" if us is None else f"{us:,.0f}" for us in times)])
    return markdown(("", "bits per weight", "KL", "1 token", "64 tokens", "4,096 tokens"), lines)


def joint_mean(run: str, column: str) -> float:
    """Return the mean over the seeds of a column of a run of joint.csv on babyllama-1m, of the latest code."""
    rows = latest_runs("babyllama-1m", mended=True)[run].values()
    return sum(float(row[column]) for row in rows) / len(rows)


TABLES = {
    "cpu-layers": cpu_layers,
    "gpu-layers": gpu_layers,
    "gqs-few": gqs_few,
    "slide24-int8": slide24_int8,
    "engine": engine,
    "readme": readme,
}
