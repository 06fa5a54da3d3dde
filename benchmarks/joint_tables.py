"""The tables of the joint search and of rounding, from the CSV files in results/."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rows import markdown, result

Row = Mapping[str, str]

Pair = tuple[str, ...]
"""What rows have in common that are compared: the seed and the commit of the code, or the seed and the texts."""

MODELS = ("stories260k", "babyllama-1m", "pycode-11m")
TARGETS = ("2.5", "2.53", "3.0", "3.5", "4.5", "6")

WAYS = {
    "+range+untuned": "`range`, untuned",
    "+range": "`range`",
    "+untuned": "`fit`, untuned",
    "": "`fit`",
    "+e2e": "`fit`, `bqpo+e2e`",
    "+kl": "`fit`, `bqpo+kl`",
}
"""The changes of a run in joint.csv, with their names."""


OLDER = ("1d8873e", "5dbb68c", "62162e8", "62162e8-seven")
"""Builds whose runs differ from today's. Of later ones uniform runs are alike: f34ef2f, 9bc8b6c.. and e192183 give
stories260k in W2 with groups of 64 the same KL to the last digit."""

MENDED = ("e414cd5", "e0861c5", "7a1517b", "c7d58b9", "fe2d6767", "a0f6062", "dropped-rate", "4ceeb5ff", "rate-by-bits")
"""Builds in which `bqpo` trains scales by the gradient of codes that do not depend on them (tuning.md)."""

FASTER_CODES = {
    **dict.fromkeys(("W4S40", "W4S50"), ("dropped-rate", "4ceeb5ff", "rate-by-bits")),
    **dict.fromkeys(("W4S30", "32:64 W8"), ("rate-by-bits",)),
}
"""Runs whose codes train faster in later builds than in the first of `MENDED`, with these builds (tuning.md)."""

WITHOUT_CODES = ("32:64", "2:4", "70%", "80%", "90%")
"""Runs that MENDED changes nothing about: they store 16 bits."""


def _kl(rows: Iterable[Row]) -> float:
    values = [float(row["kl"]) for row in rows]
    return sum(values) / len(values)


def _runs(model: str) -> dict[str, dict[Pair, Row]]:
    """Return the rows of a model in joint.csv: run, (seed, build) -> row."""
    found: dict[str, dict[Pair, Row]] = {}
    for row in result("joint.csv"):
        if row["model"] == model:
            found.setdefault(row["run"], {})[row["seed"], row["build"]] = row
    return found


def latest_runs(model: str, mended: bool) -> dict[str, dict[Pair, Row]]:
    """Return a model's rows of the latest code: run, (seed, calibration sequences, tokens of the evaluation) -> row.

    Runs with codes are left out if they are of `OLDER` builds, or have the other gradient of scales than ``mended``.
    """
    found: dict[str, dict[Pair, Row]] = {}
    for row in result("joint.csv"):
        base = row["run"].partition("+")[0]
        current = FASTER_CODES.get(base, MENDED)
        own = (row["build"] in current) == mended and row["build"] not in OLDER
        if row["model"] == model and (own or base in WITHOUT_CODES):
            found.setdefault(row["run"], {})[row["seed"], row["samples"], row["tokens"]] = row
    return found


def _alike(rows: Collection[Row]) -> list[Row]:
    """Return the rows of one calibration and evaluation text: of that which most rows have, or of the latest such."""
    texts = [(row["samples"], row["tokens"]) for row in rows]
    most = max(reversed(texts), key=texts.count, default=None)
    return [row for row in rows if (row["samples"], row["tokens"]) == most]


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("%", " %")


def joint() -> str:
    """KL of `auto` beside the best uniform recipe of the same or fewer bits, on the seeds and texts that both have."""
    tables = []
    for model in MODELS:
        older, newer = (latest_runs(model, mended) for mended in (False, True))
        lines = [
            line
            for target in TARGETS
            for line in _beside_uniform(newer, target) or _beside_uniform(older, target, note=" \\*")
        ]
        if lines:
            tables.append(markdown((model, "`auto`", "best uniform recipe", ""), lines))
    return "\n\n".join(tables)


def _beside_uniform(runs: Mapping[str, Mapping[Pair, Row]], target: str, note: str = "") -> list[list[str]]:
    """Return the line of a target, its name followed by ``note``; none if it was not measured."""
    lines = []
    for way, name in (("", f"bits={target}{note}"), ("+inputs", f"bits={target}{note}, `search_units=inputs`")):
        auto = runs.get(f"auto {target}{way}", {})
        if not auto or (way and f"auto {target}" in runs):
            continue
        found = []
        for run, rows in runs.items():
            both = auto.keys() & rows.keys()
            stored = float(next(iter(rows.values()))["bits"])
            if both and "+" not in run and not run.startswith("auto") and stored <= float(target):
                found.append((_kl(rows[pair] for pair in both), run, stored, both))
        if found:
            other, run, stored, both = min(found, key=lambda each: each[0])
            own = _kl(auto[pair] for pair in both)
            beside = f"{run}, {stored:.2f} bits: {other:.4f}"
            lines.append([name, f"{own:.4f} ({len(both)})", beside, _percent(own / other - 1)])
        else:
            lines.append([name, f"{_kl(auto.values()):.4f} ({len(auto)})", "not measured, or none stores so few", ""])
    return lines


def uniform() -> str:
    """KL of every uniform run with fitted scales, or without scales, by stored bits; * before the mended gradient."""
    older, newer = ({model: latest_runs(model, mended) for model in MODELS} for mended in (False, True))
    every = {model: _runs(model) for model in MODELS}
    names = dict.fromkeys(run for runs in every.values() for run in runs if "+" not in run)
    shown = [run for run in names if not run.startswith("auto")]

    def rows_of(run: str, model: str) -> tuple[list[Row], str]:
        new, old, oldest = (_alike(kind[model].get(run, {}).values()) for kind in (newer, older, every))
        return (new, "") if new else (old or oldest, " \\*")

    def bits(run: str) -> float:
        return float(next(row["bits"] for model in MODELS[::-1] for row in rows_of(run, model)[0]))

    lines = []
    for run in sorted(shown, key=bits):
        found = [rows_of(run, model) for model in MODELS]
        lines.append(
            [run, f"{bits(run):.2f}", *(f"{_kl(rows):.4f} ({len(rows)}){note}" if rows else "" for rows, note in found)]
        )
    return markdown(("", "bits", *MODELS), lines)


def rounding() -> str:
    """KL of uniform runs by how their scales are found and tuned, seed 0, means over the builds before `MENDED`."""
    lines = []
    for model in MODELS:
        runs = _runs(model)
        for base in dict.fromkeys(run.partition("+")[0] for run in runs):
            found = {}
            for way in WAYS:
                rows = [
                    row
                    for (seed, build), row in runs.get(base + way, {}).items()
                    if seed == "0" and (build not in MENDED)
                ]
                if rows:
                    found[way] = _kl(rows)
            if len(found) > 1 and not base.startswith("auto"):
                lines.append([model, base, *(f"{found[way]:.4f}" if way in found else "" for way in WAYS)])
    return markdown(("model", "run", *WAYS.values()), lines)


def four_bits() -> str:
    """KL of 32:64 in 4 bits by how it is tuned, and over that of 16 bits after `bqpo` on the same seeds and texts."""
    columns = {
        "16 bits, `bqpo`": "32:64",
        "`w4`, `bqpo`": "32:64 W4",
        "`w4`, `bqpo+kl`": "32:64 W4+kl",
        "`w4`, `bqpo+distil`": "32:64 W4+distil",
        "16 bits, `bqpo+distil`": "32:64+distil",
    }
    lines = []
    for model in MODELS:
        runs, cells = latest_runs(model, mended=True), list[str]()
        plain = {(row["seed"], row["samples"], row["tokens"]): row for row in _alike(runs["32:64"].values())}
        for run in columns.values():
            both = plain.keys() & runs.get(run, {}).keys()
            if not both:
                cells.append("")
                continue
            own, reference = (_kl(rows[pair] for pair in both) for rows in (runs[run], plain))
            cells.append(f"{own:.4f} ({own / reference:.2f}; {len(both)})")
        lines.append([model, *cells])
    return markdown(("", *columns), lines)


EQUAL_BYTES = (
    "W2 g64", "W2 g32", "W4S50", "W4S50+e2e", "W4S50+kl", "W3 g128", "32:64 W4", "32:64 W4+kl", "32:64 W4+distil",
    "2:4 W4", "W4S40", "W3 g64", "W4S30", "W4 g128", "W4 g64", "W4S20", "W4 g32",
)  # fmt: skip
"""Runs of joint.csv that take 2.4 to 4.8 bits per weight, dense and sparse."""


def equal_bytes() -> str:
    """KL of tuned low-bit runs by stored bits, each model's bits beside it."""
    latest = {model: latest_runs(model, mended=True) for model in MODELS}
    lines = []
    for run in EQUAL_BYTES:
        base, _, change = run.partition("+")
        cells = [f"{base}, `bqpo{change and '+'}{change}`"]
        for runs in latest.values():
            rows = _alike(runs.get(run, {}).values())
            cells.append(f"{float(rows[0]['bits']):.2f}: {_kl(rows):.4f} ({len(rows)})" if rows else "")
        if any(cells[1:]):
            lines.append(cells)
    return markdown(("", *MODELS), lines)


SWITCHES = {"submodules": "`tune_units=submodules`", "swaps": "`refine=swaps`", "onepass": "`refine=none`"}
"""The changes of a run in joint.csv that are switches of pruning and tuning, with their settings."""


def switches() -> str:
    """KL of tuned uniform runs without and with a switch, means over the seeds and texts that both have."""
    latest = {model: latest_runs(model, mended=True) for model in MODELS}
    lines = []
    for switch, setting in SWITCHES.items():
        bases = dict.fromkeys(
            run.partition("+")[0] for runs in latest.values() for run in runs if run.endswith(f"+{switch}")
        )
        for base in bases:
            cells = []
            for runs in latest.values():
                plain, changed = (runs.get(name, {}) for name in (base, f"{base}+{switch}"))
                both = plain.keys() & changed.keys()
                before, after = (_kl(rows[pair] for pair in both) if both else 0.0 for rows in (plain, changed))
                change = _percent(after / before - 1) if both else ""
                cells.append(f"{before:.4f}, {after:.4f} ({change}; {len(both)})" if both else "")
            lines.append([setting, base, *cells])
    return markdown(("", "", *MODELS), lines)


def units() -> str:
    """KL of `auto` by what gets one choice, on the seeds and builds that both have."""
    lines = []
    for model in MODELS:
        runs = _runs(model)
        for target in TARGETS:
            own, shared = (runs.get(f"auto {target}{way}", {}) for way in ("", "+inputs"))
            both = own.keys() & shared.keys()
            if both:
                before, after = (_kl(rows[pair] for pair in both) for rows in (shared, own))
                lines.append([model, f"bits={target}", f"{before:.4f}", f"{after:.4f}", _percent(after / before - 1)])
    return markdown(("model", "target", "`inputs`", "`linears`", ""), lines)


def mixed() -> str:
    """KL of mixtures of 2:4 and dense in 8 bits, and of uniform patterns of the same predicted prompt time."""
    rows, lines = result("mixed_sparsity.csv"), []
    for model in dict.fromkeys(row["model"] for row in rows):
        for base in ("6:8", "4:6"):
            own = [row for row in rows if row["model"] == model and row["run"].startswith(f"{base}+")]
            uniform_rows = [row for row in own if row["run"] == f"{base}+uniform"]
            for run in dict.fromkeys(row["run"] for row in own):
                found, way = [row for row in own if row["run"] == run], run.partition("+")[2]
                share = f"{sum(float(row['share_2:4']) for row in found) / len(found):.0%}".replace("%", " %")
                speed, kl = f"{found[0]['speedup']}x", f"{_kl(found):.4f} ({len(found)})"
                if way == "uniform":
                    lines.append([model, speed, f"uniform {base}", "", kl, ""])
                else:
                    change = _percent(_kl(found) / _kl(uniform_rows) - 1) if uniform_rows else ""
                    lines.append([model, speed, f"mixture: {way}", share, kl, change])
    return markdown(("model", "prompt", "", "layers in 2:4", "KL", ""), lines)


def mixtures() -> str:
    """Return the predicted and the measured speed-up of models whose layers were chosen for a target."""
    lines = []
    for row in result("h200/target-mixtures.csv"):
        key, _, asked = row["target"].partition("=")
        gpu = row["gpu"].removeprefix("NVIDIA ")
        change = _percent(float(row["measured_over_asked"]) - 1)
        steps = [f"{float(row[column]):.3f}" for column in ("step_ms", "predicted_step_ms", "dense_step_ms")]
        launched = "CUDA graph" if row["captured"] == "yes" else "from Python"
        lines.append([f"{key}={asked}", launched, f"{float(row['measured']):.3f}x", change, *steps, gpu])
    heads = ("target", "launched", "measured", "of what was asked", "ms", "predicted ms", "dense ms", "GPU")
    return markdown(heads, lines)


def frontier_time() -> str:
    """Return the seconds of each stage of `frontier`, by model and device."""
    rows = result("frontier_time.csv")
    runs = list(dict.fromkeys((row["model"], row["computed_on"]) for row in rows))
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    seconds = {((row["model"], row["computed_on"]), row["stage"]): float(row["seconds"]) for row in rows}
    lines = [[stage, *(f"{seconds[run, stage]:.0f}" for run in runs)] for stage in stages]
    lines.append(["in all", *(f"{sum(seconds[run, stage] for stage in stages):.0f}" for run in runs)])
    return markdown(("", *(f"{model}, {where}" for model, where in runs)), lines)


TABLES = {
    "joint": joint,
    "frontier-time": frontier_time,
    "target-mixtures": mixtures,
    "joint-uniform": uniform,
    "joint-units": units,
    "four-bits": four_bits,
    "switches": switches,
    "equal-bytes": equal_bytes,
    "rounding": rounding,
    "mixed-sparsity": mixed,
}
