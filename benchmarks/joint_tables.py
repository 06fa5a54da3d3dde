"""The tables of the joint search, of rounding and of targets, from the CSV files in results/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rows import markdown, result

Row = Mapping[str, str]

MODELS = ("stories260k", "babyllama-1m", "pycode-11m")
TARGETS = ("2.5", "3.0", "3.5", "4.5", "6")

WAYS = {
    "+range": "`scales=range`",
    "+untuned": "`fit`, untuned",
    "": "`fit`",
    "+e2e": "`fit`, `bqpo+e2e`",
    "+kl": "`fit`, `bqpo+kl`",
}
"""The changes of a run in joint.csv, with their names."""


def _kl(rows: Iterable[Row]) -> float:
    values = [float(row["kl"]) for row in rows]
    return sum(values) / len(values)


def _runs(model: str) -> dict[str, dict[str, Row]]:
    """Return the rows of a model in joint.csv: run, seed -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in result("joint.csv"):
        if row["model"] == model:
            found.setdefault(row["run"], {})[row["seed"]] = row
    return found


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("%", " %")


def joint() -> str:
    """KL of `auto` beside the best uniform recipe of the same or fewer bits, on the seeds that both have."""
    tables = []
    for model in MODELS:
        runs, lines = _runs(model), []
        for target in TARGETS:
            auto = runs.get(f"auto {target}")
            if not auto:
                continue
            pairs = []
            for run, rows in runs.items():
                seeds = auto.keys() & rows.keys()
                stored = float(next(iter(rows.values()))["bits"])
                if seeds and "+" not in run and not run.startswith("auto") and stored <= float(target):
                    pairs.append((_kl(rows[seed] for seed in seeds), run, stored, seeds))
            if not pairs:
                lines.append([f"bits={target}", f"{_kl(auto.values()):.4f} ({len(auto)})", "none stores so few", ""])
                continue
            other, run, stored, seeds = min(pairs, key=lambda pair: pair[0])
            own = _kl(auto[seed] for seed in seeds)
            name = f"{run}, {stored:.2f} bits: {other:.4f}"
            lines.append([f"bits={target}", f"{own:.4f} ({len(seeds)})", name, _percent(own / other - 1)])
        if lines:
            tables.append(markdown((model, "`auto`", "best uniform recipe", ""), lines))
    return "\n\n".join(tables)


def uniform() -> str:
    """KL of every uniform run, by stored bits of the largest model."""
    runs = {model: _runs(model) for model in MODELS}
    names = dict.fromkeys(run for model in MODELS for run in runs[model] if "+" not in run)
    shown = [run for run in names if not run.startswith("auto")]

    def bits(run: str) -> float:
        rows = [row for model in MODELS for row in runs[model].get(run, {}).values()]
        return float(rows[-1]["bits"])

    lines = []
    for run in sorted(shown, key=bits):
        cells = []
        for model in MODELS:
            rows = runs[model].get(run)
            cells.append(f"{_kl(rows.values()):.4f} ({len(rows)})" if rows else "")
        lines.append([run, f"{bits(run):.2f}", *cells])
    return markdown(("", "bits", *MODELS), lines)


def rounding() -> str:
    """KL of uniform runs by how their scales are found and tuned, seed 0."""
    lines = []
    for model in MODELS:
        runs = _runs(model)
        for base in dict.fromkeys(run.partition("+")[0] for run in runs):
            found = {way: runs[base + way]["0"] for way in WAYS if "0" in runs.get(base + way, {})}
            if len(found) > 1 and not (base.startswith("auto") and len(found) < 2):
                cells = [f"{float(found[way]['kl']):.4f}" if way in found else "" for way in WAYS]
                lines.append([model, base, *cells])
    return markdown(("model", "run", *WAYS.values()), lines)


def units() -> str:
    """KL of `auto` by what gets one choice, seed 0."""
    lines = []
    for model in MODELS:
        runs = _runs(model)
        for target in TARGETS:
            own, shared = (runs.get(f"auto {target}{way}", {}).get("0") for way in ("", "+inputs"))
            if own and shared:
                change = _percent(float(own["kl"]) / float(shared["kl"]) - 1)
                lines.append([model, f"bits={target}", f"{float(shared['kl']):.4f}", f"{float(own['kl']):.4f}", change])
    return markdown(("model", "target", "`inputs`", "`linears`", ""), lines)


def mixed() -> str:
    """KL of mixtures of 2:4 and dense in 8 bits, and of uniform patterns of the same predicted prompt time."""
    rows = result("mixed_sparsity.csv")
    lines = []
    for uniform_run in ("6:8", "4:6"):
        own = [row for row in rows if row["run"].startswith(f"{uniform_run}+")]
        base = [row for row in own if row["run"].endswith("+uniform")]
        for run in dict.fromkeys(row["run"] for row in own):
            found = [row for row in own if row["run"] == run]
            name = run.partition("+")[2]
            name = f"uniform {uniform_run}" if name == "uniform" else f"mixture: {name}"
            share = f"{sum(float(row['share_2:4']) for row in found) / len(found):.0%}".replace("%", " %")
            change = "" if name.startswith("uniform") else _percent(_kl(found) / _kl(base) - 1)
            lines.append([f"{found[0]['speedup']}x", name, share, f"{_kl(found):.4f} ({len(found)})", change])
    return markdown(("prompt", "", "2:4 layers", "KL", ""), lines)


def target_speed() -> str:
    """Predicted and measured speed-ups of targets on an H200."""
    lines = []
    for row in result("target_speed.csv"):
        step = f"{float(row['predicted_step_ms']):.3f} / {float(row['step_ms']):.3f} ms"
        error = f"{float(row['step_error']):+.1%}".replace("%", " %")
        lines.append([row["target"], f"{row['predicted']}x", f"{row['measured']}x", step, error])
    return markdown(("target", "linear layers, predicted", "measured", "engine, predicted / measured", ""), lines)


TABLES = {
    "joint": joint,
    "joint-uniform": uniform,
    "joint-units": units,
    "rounding": rounding,
    "mixed-sparsity": mixed,
    "target-speed": target_speed,
}
