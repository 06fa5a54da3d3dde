"""The tables of docs/experiments/blocks.md, host-path.md and docs/kernels/every-token.md: blocks, single matmuls."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rows import markdown, result

Row = Mapping[str, str]

NAMES = {
    "dense": "dense bfloat16",
    "bitmask": "bitmask 32:64",
    "gqs": "gqs W4, g16@50%",
    "vector_nm": "vector_nm 16:32v32",
    "ec_csr": "ec_csr 70%",
}
BATCHES = ("1", "2", "4", "8", "16", "32", "64", "96", "128")
TURNS = "h200/blocks-turns.csv"

TUNED = Path(__file__).parents[1] / "semisparse/formats/tables/nvidia-h200.csv"

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
    """Decode steps of 8 blocks by batch, relative to dense."""
    return beside_dense(TURNS, "step", BATCHES, "batch")


def prompts() -> str:
    """Captured prompts of 8 blocks by length."""
    return beside_dense(TURNS, "prompt", PROMPTS, "tokens, captured")


def ways() -> str:
    """Prompts launched from Python and captured."""
    rows, lines = result("h200/captured-prompts.csv"), []
    for arch, layers, weights in dict.fromkeys((row["arch"], row["layers"], row["weights"]) for row in rows):
        own = [row for row in rows if (row["arch"], row["layers"], row["weights"]) == (arch, layers, weights)]
        for tokens in sorted({int(row["tokens"]) for row in own}):
            ms = {row["way"]: float(row["ms"]) for row in own if int(row["tokens"]) == tokens}
            once = f"{ms['second'] - ms['python']:.0f}" if tokens > 512 else ""
            cells = [f"{ms['python']:.1f}", f"{ms['captured']:.1f}", f"{ms['gpu']:.1f}", once]
            lines.append([f"{arch}, {layers} layers, {weights}", f"{tokens:,}", *cells])
    return markdown(("", "tokens", "from Python", "captured", "GPU alone", "capturing, once"), lines)


def padding() -> str:
    """Graphs of padded prompts and of the same without padding."""
    rows, lines = result("h200/sweeps/captured-prompts-padding.csv"), []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == weights]
        for tokens in sorted({int(row["tokens"]) for row in own}):
            ms = {row["way"]: float(row["ms"]) for row in own if int(row["tokens"]) == tokens}
            share = ms["gpu"] / ms["unpadded"]
            cells = [f"{ms[way]:.2f}" for way in ("unpadded", "gpu", "captured", "python")]
            lines.append(
                [
                    NAMES[weights],
                    f"{tokens:,}",
                    f"{-(-tokens // 128) * 128:,}",
                    cells[0],
                    f"{cells[1]} ({share:.2f})",
                    *cells[2:],
                ]
            )
    return markdown(("", "tokens", "padded to", "GPU, unpadded", "GPU, padded", "captured", "from Python"), lines)


def rested() -> str:
    """Captured prompts of 8 blocks by length, each after a pause."""
    return beside_dense(TURNS, "idle", PROMPTS, "tokens, captured, after a pause")


def unpacked() -> str:
    """Captured prompts of 8 blocks by how weights are taken, relative to dense."""
    found, lines = by_work(TURNS), []
    counts = [count for count in PROMPTS if ("gqs gemm", "prompt", count) in found]
    for weights, name in NAMES.items():
        if weights != "dense":
            times = [[found[weights + kind, "prompt", count] for kind in (" gemm", " unpack", "")] for count in counts]
            dense = [found["dense", "prompt", count] for count in counts]
            pairs = zip(times, dense, strict=True)
            lines.append([name, *(" / ".join(f"{time / beside:.2f}" for time in of) for of, beside in pairs)])
    return markdown(("GEMMs / unpacked / by the table", *(f"{int(count):,}" for count in counts)), lines)


def launched() -> str:
    """Prompts of 8 blocks, launched from Python, by length."""
    return beside_dense(TURNS, "eager", PROMPTS, "tokens, launched from Python")


def as_generated() -> str:
    """Prompts of 8 blocks as `generate` runs them."""
    return beside_dense(TURNS, "wall", PROMPTS, "tokens, as `generate` runs them")


EC_CSR = "h200/blocks-ec_csr.csv"
"""Blocks in ec_csr and dense, of a later call."""


def formats() -> str:
    """Milliseconds of steps of 32 blocks in all formats, of two calls."""
    lines = []
    for file in ("h200/blocks-formats.csv", EC_CSR):
        whole = by_work(file, "32")
        for weights in dict.fromkeys(weights for weights, _, _ in whole):
            times = [(whole[weights, "step", count], whole["dense", "step", count]) for count in ("1", "8")]
            cells = [f"{us / 1e3:.2f}" + ("" if weights == "dense" else f" ({us / dense:.2f})") for us, dense in times]
            lines.append([NAMES[weights] + (", beside ec_csr" if (weights, file) == ("dense", EC_CSR) else ""), *cells])
    return markdown(("batch", "1", "8"), lines)


TOKENS = ("1", "8", "16", "32", "64", "128", "256", "1024")

TARGETS = {
    ("28672", "8192", "gqs w4 g16@50%"): (33, 36, 40, 48, 62, 100, 185, 640),
    ("28672", "8192", "gqs w4 g128@0%"): (38, 40, 44, 53, 68, 108, 200, 650),
    ("28672", "8192", "gqs w2 g64@0%"): (26, 30, 36, 45, 60, 100, 185, 640),
    ("28672", "8192", "bitmask 32:64"): (66, 66, 70, 76, 88, 110, 175, 640),
    ("28672", "8192", "vector_nm 16:32v32"): (64, 64, 68, 76, 88, 110, 175, 640),
    ("28672", "8192", "ec_csr 70%"): (55, 60, 70, 85, 100, 125, 189, 650),
    ("4096", "4096", "gqs w4 g16@50%"): (5.2, 6, 7, 9, 11, 14, 19, 47),
    ("4096", "4096", "bitmask 32:64"): (7.6, 8, 8.5, 10, 12, 14, 19, 47),
}
"""Microseconds that were asked for before the kernels were written, by N, K and weights, for each of `TOKENS`."""


LARGE, SMALL = ("28672", "8192"), ("4096", "4096")
BETWEEN = (("11008", "4096"), ("4096", "11008"))
"""Shapes whose targets are "in proportion": those of `LARGE` and `SMALL`, interpolated by the number of weights."""


def targets(n: str, k: str, weights: str) -> tuple[float, ...]:
    """Return the targets of a shape and weights for each of `TOKENS`, or none."""
    if (n, k) not in BETWEEN or (*SMALL, weights) not in TARGETS:
        return TARGETS.get((n, k, weights), ())
    (least, most), own = ((int(a) * int(b) for a, b in (SMALL, LARGE)), int(n) * int(k))
    share = (own - least) / (most - least)
    pairs = zip(TARGETS[(*SMALL, weights)], TARGETS[(*LARGE, weights)], strict=True)
    return tuple(round(small + share * (large - small), 1) for small, large in pairs)


def every_token(n: str, k: str) -> str:
    """Microseconds of a shape by weights and tokens, beside the target."""
    rows = [row for row in result("h200/every-token.csv") if (row["n"], row["k"]) == (n, k)]
    times = {(row["weights"], row["m"]): float(row["us"]) for row in rows}
    lines = []
    for weights in dict.fromkeys(weights for weights, _ in times):
        cells = [f"{times[weights, m]:.1f}" if (weights, m) in times else "" for m in TOKENS]
        asked = targets(n, k, weights)
        if asked:
            cells = [f"{cell} / {target:g}" for cell, target in zip(cells, asked, strict=True)]
        lines.append([weights, *cells])
    return markdown((f"{n} x {k}", *(f"{int(m):,}" for m in TOKENS)), lines)


VARIANTS = {"gqs w4": "w4", "gqs w2": "w2"}
"""The variant in the tuned table, by the beginning of a weight's name."""


def tuned() -> dict[tuple[str, ...], float]:
    """Return the fastest kernel's microseconds in the H200's table, by N, K, weights, dtype and M."""
    found: dict[tuple[str, ...], float] = {}
    names = {weights for _, _, weights in TARGETS}
    of_table = {(w.split()[0], w.split()[-1], VARIANTS.get(w[:6], "")): w for w in names}
    with TUNED.open(newline="") as file:
        for row in csv.DictReader(file):
            weights = of_table.get((row["format"], row["pattern"], row["variant"]))
            if weights and row["us"]:
                key = (row["n"], row["k"], weights, row["dtype"], row["m"])
                found[key] = min(float(row["us"]), found.get(key, float("inf")))
    return found


def cases() -> list[tuple[str, str, str]]:
    """Return N, K and weights of everything that has targets."""
    return [*TARGETS, *((*shape, weights) for shape in BETWEEN for n, k, weights in TARGETS if (n, k) == SMALL)]


def met() -> str:
    """How many targets every-token.csv meets, of those for each of `TOKENS`, and the largest miss."""
    once = {(row["n"], row["k"], row["weights"], row["m"]): row["us"] for row in result("h200/every-token.csv")}
    shapes, cells = (LARGE, SMALL, *BETWEEN), {}
    for n, k, weights in cases():
        pairs = zip(TOKENS, targets(n, k, weights), strict=True)
        over = [round(100 * (float(once[n, k, weights, m]) / target - 1)) for m, target in pairs]
        cells[n, k, weights] = f"{sum(value <= 0 for value in over)} of {len(over)}, at most +{max(over)} %"
    lines = [
        [weights, *(cells.get((*shape, weights), "") for shape in shapes)]
        for weights in dict.fromkeys(weights for *_, weights in cases())
    ]
    return markdown(("targets met", *(f"{n} x {k}" for n, k in shapes)), lines)


def missed() -> str:
    """By how many per cent each target is missed: every-token.csv / the tuned table's float16 / its bfloat16."""
    once = {(row["n"], row["k"], row["weights"], row["m"]): row["us"] for row in result("h200/every-token.csv")}
    table, lines = tuned(), []
    for n, k, weights in cases():
        cells = []
        for m, target in zip(TOKENS, targets(n, k, weights), strict=True):
            times = [float(once[n, k, weights, m])]
            times += [table[n, k, weights, dtype, m] for dtype in ("float16", "bfloat16")]
            over = [round(100 * (time / target - 1)) for time in times]
            cells.append("met" if max(over) <= 0 else " / ".join(f"{value:+d}" if value else "0" for value in over))
        lines.append([f"{n} x {k}", weights, *cells])
    return markdown(("", "over the target, %", *(f"{int(m):,}" for m in TOKENS)), lines)


WAITS = {
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory",
    "mio_throttle": "its queue",
    "wait": "fixed latency",
    "not_selected": "to be selected",
    "math_pipe_throttle": "a pipe",
    "dispatch_stall": "dispatch",
    "barrier": "barrier",
    "gmma": "wgmma",
    "branch_resolving": "branch",
    "no_instruction": "instructions",
    "imc_miss": "constants",
}
"""What warps wait for, by ncu's names."""


def profiles() -> str:
    """Nsight Compute's figures of kernels that miss a target, and of cuBLAS."""
    lines = []
    rows = result("h200/sweeps/missed-cells-ncu.csv")
    for row in sorted(rows, key=lambda row: (-int(row["n"]) * int(row["k"]), -int(row["n"]), int(row["m"]))):
        waits = [part.rsplit(" ", 1) for part in row["stalls"].split("; ") if not part.startswith("selected")]
        three = ", ".join(f"{WAITS[name]} {float(cycles):.1f}" for name, cycles in waits[:3])
        names = ("tensor", "issue", "alu", "shared_memory", "l2", "dram")
        shares = [f"{float(row[f'{name}_percent']):.0f}" for name in names]
        kernel = row["weights"] if row["weights"] == row["kernel"] else f"{row['weights']} {row['kernel']}"
        size = f"{row['n']} x {row['k']}"
        lines.append([size, f"{int(row['m']):,}", kernel, *shares, row["eligible_warps"], three])
    header = ("", "tokens", "kernel", "tensor", "issue", "ALU", "shared", "L2", "DRAM", "eligible", "waits")
    return markdown(header, lines)


MANY = (("1", "1"), ("2", "1"), ("1", "0"), ("2", "0"))
"""CTAs per cluster and split_k (0: Stream-K) of the schedules for many tokens."""


def many_tokens() -> str:
    """Microseconds of schedules for 1,024 to 4,096 tokens, the lower of two; bold what the rule takes."""
    times: dict[tuple[str, ...], list[float]] = {}
    chosen = set()
    for row in result("h200/sweeps/gemm-many.csv"):
        case = (row["m"], f"{row['n']} x {row['k']}", row["weights"])
        key = (*case, row["cluster"], row["split_k"])
        times.setdefault(key, []).append(float(row["us"]))
        if row["kernel"] == "chosen":
            chosen.add(key)
    lines = []
    for m, shape in sorted({key[:2] for key in times}, key=lambda one: (int(one[0]), one[1])):
        cells = []
        for weights in ("bitmask", "gqs", "vector_nm", "ec_csr"):
            keys = [(m, shape, weights, *one) for one in MANY]
            texts = [f"{min(times[key]):.0f}" for key in keys]
            cells.append(
                " / ".join(f"**{text}**" if key in chosen else text for key, text in zip(keys, texts, strict=True))
            )
        lines.append([f"{int(m):,}", shape, f"{min(times[m, shape, 'dense', '', '']):.0f}", *cells])
    return markdown(("tokens", "whole / multicast / Stream-K / both", "cuBLAS", *list(NAMES)[1:]), lines)


TABLES = {"blocks-steps": steps, "blocks-prompts": prompts, "blocks-launched": launched}
TABLES |= {
    "blocks-rested": rested,
    "captured-prompts": ways,
    "captured-padding": padding,
    "blocks-unpacked": unpacked,
    "blocks-formats": formats,
    "blocks-generated": as_generated,
    "every-token-large": partial(every_token, "28672", "8192"),
    "every-token-small": partial(every_token, "4096", "4096"),
    "every-token-tall": partial(every_token, "11008", "4096"),
    "every-token-wide": partial(every_token, "4096", "11008"),
    "every-token-met": met,
    "every-token-missed": missed,
    "every-token-profiles": profiles,
    "gemm-many": many_tokens,
}
