"""The tables of docs/quality.md: loss and KL by recipe, from the CSV files in results/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rows import markdown, result

Row = Mapping[str, str]

PRUNED = ("2:4", "4:8", "6:8", "32:64", "50%")
PRUNERS = {
    "magnitude": "magnitude",
    "wanda": "wanda",
    "sparsegpt-published": "SparseGPT as published",
    "sparsegpt": "`sparsegpt`: repeated masks",
    "sparsegpt + gains": "`sparsegpt` + gains",
}
"""Names by the method in pruners.csv."""


def _mean(rows: Iterable[Row], column: str) -> float:
    values = [float(row[column]) for row in rows]
    return sum(values) / len(values)


def pruners() -> str:
    """Loss / KL of every model, pruner and pattern."""
    rows = result("pruners.csv")
    tables = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = {(row["pattern"], row["method"]): row for row in rows if row["model"] == model}
        dense = float(next(iter(cells.values()))["dense_nll"])
        lines = [
            [name, *(f"{float(cells[p, method]['nll']):.3f} / {float(cells[p, method]['kl']):.3f}" for p in PRUNED)]
            for method, name in PRUNERS.items()
            if all((pattern, method) in cells for pattern in PRUNED)
        ]
        tables.append(markdown((f"{model} (dense {dense:.3f})", *PRUNED), lines))
    return "\n\n".join(tables)


def other_text() -> str:
    """Return the KL on text of both kinds, by the text that the model was calibrated on."""
    rows, lines = result("other_text.csv"), []
    names = {"own": "its own kind", "other": "the other kind", "mixed": "half of each"}
    for model in dict.fromkeys(row["model"] for row in rows):
        for calibration, name in names.items():
            own = {row["method"]: row for row in rows if (row["model"], row["calibration"]) == (model, calibration)}
            plain, *better = (
                own.get(method) for method in ("sparsegpt", "sparsegpt + gains", "sparsegpt + gains, bqpo")
            )
            assert plain, f"other_text.csv has no row of {model} calibrated on {calibration}"
            cells = []
            for kind in ("kl_own", "kl_other"):
                before = float(plain[kind])
                changes = [f"{float(row[kind]) / before - 1:+.0%}".replace("%", " %") if row else "" for row in better]
                after = [
                    f"{float(row[kind]):.3f} ({change})" if row else ""
                    for row, change in zip(better, changes, strict=True)
                ]
                cells += [f"{before:.3f}", *after]
            lines.append([model, name, *cells])
    header = (
        "",
        "calibrated on",
        *(f"{kind}{way}" for kind in ("own", "other") for way in ("", ", gains", ", `bqpo`")),
    )
    return markdown(header, lines)


SEARCHED = {
    "uniform n:8": "uniform 4:8, 3:8, 2:8",
    "uniform n:64": "uniform n:64",
    "rheosparse": "`search=rheosparse` (the paper's loop)",
    "evolution": "`search=evolution`",
    "unstructured": "unstructured, uniform",
    "uniform n:64 (decided once)": "uniform n:64, SparseGPT as published",
    "evolution (decided once)": "`search=evolution`, SparseGPT as published",
}
"""Names by the method in search.csv."""

SEARCHED_FROM = {
    "rheosparse": "uniform n:64",
    "evolution": "uniform n:64",
    "evolution (decided once)": "uniform n:64 (decided once)",
}


def search() -> str:
    """KL by search and sparsity, and its change against the uniform one of the same seeds."""
    tables = []
    for model in ("babyllama-1m", "pycode-11m"):
        rows = [row for row in result("search.csv") if row["model"] == model]
        kl = {
            (row["method"], row["zeros"]): _mean(
                [r for r in rows if (r["method"], r["zeros"]) == (row["method"], row["zeros"])], "kl"
            )
            for row in rows
        }
        lines = []
        for method, name in SEARCHED.items():
            cells = []
            for zeros in ("50", "62.5", "75"):
                if (method, zeros) not in kl:
                    continue
                base = SEARCHED_FROM.get(method)
                change = f" ({kl[method, zeros] / kl[base, zeros] - 1:+.0%})".replace("%", " %") if base else ""
                cells.append(f"{kl[method, zeros]:.3f}{change}")
            if cells:
                lines.append([name, *cells])
        tables.append(markdown((model, "50 % zeros", "62.5 %", "75 %"), lines))
    return "\n\n".join(tables)


GROUPS = {
    "W4 dense": "W4, nothing pruned",
    **{
        f"W4S{share}{suffix}": f"W4S{share}{name}"
        for share in (20, 30, 40, 50)
        for suffix, name in (
            (" one-shot", ", one-shot"),
            (" + bqpo", " after `bqpo`"),
            (" + bqpo + e2e", " after `bqpo+e2e`"),
        )
    },
    "W2 to nearest": "W2 to nearest",
    "W2 dense": "W2, nothing pruned, second-order",
    "sparsegpt 2:4": "SparseGPT 2:4 in 16 bits",
    "sparsegpt 2:4 W4": "SparseGPT 2:4, rounded to 4 bits",
    "bqpo 2:4": "2:4 after `bqpo`, in 16 bits",
    "bqpo 2:4 W4": "2:4 after `bqpo`, rounded to 4 bits",
    "bqpo 4:8": "4:8 after `bqpo`, in 16 bits",
    "bqpo 32:64": "32:64 after `bqpo`, in 16 bits",
    "bqpo 32:64 W4": "32:64 after `bqpo`, rounded to 4 bits",
    "W8 dense": "W8, nothing pruned",
}
"""Names by the run in gqsa.csv."""


def gqsa() -> str:
    """Bits per weight and loss / KL of groups, tuned and not."""
    rows = result("gqsa.csv")
    lines = []
    for run, name in GROUPS.items():
        of_run = [row for row in rows if row["run"] == run]
        cells = [
            f"{_mean(of_model, 'nll'):.3f} / {_mean(of_model, 'kl'):.3f}"
            for model in ("babyllama-1m", "pycode-11m")
            for of_model in [[row for row in of_run if row["model"] == model]]
        ]
        bits = _mean([row for row in of_run if row["model"] == "babyllama-1m"], "bits")
        lines.append([name, f"{bits:.2f}", *cells])
    return markdown(("", "bits per weight", "babyllama-1m (dense 0.886)", "pycode-11m (dense 1.678)"), lines)


CODES = {
    "bqpo 32:64": "16 bits, after `bqpo`",
    "bqpo 32:64 in w8": "`w8`, after `bqpo`",
    "bqpo 32:64 in w4": "`w4`, after `bqpo`",
    "bqpo+e2e 32:64 in w4": "`w4`, after `bqpo+e2e`",
}
"""Names by the run in bitmask_quality.csv."""


def codes() -> str:
    """Bits per weight, loss / KL and KL over that of 16 bits of 32:64 in `bitmask`, seed 0."""
    rows = {(row["model"], row["run"]): row for row in result("bitmask_quality.csv")}
    models = ("stories260k", "babyllama-1m")
    lines = []
    for run, name in CODES.items():
        of_run = [rows[model, run] for model in models]
        sixteen = [float(rows[model, "bqpo 32:64"]["kl"]) for model in models]
        cells = [
            f"{float(row['nll']):.3f} / {float(row['kl']):.3f} ({float(row['kl']) / kl:.2f})"
            for row, kl in zip(of_run, sixteen, strict=True)
        ]
        lines.append([name, f"{_mean(of_run, 'bits'):.2f}", *cells])
    return markdown(("32:64 in", "bits per weight", *models), lines)


def slide24() -> str:
    """Loss / KL by pattern and quantisation."""
    measured = [row for row in result("slide24_quality.csv") if row["samples"] == "default"]
    rows = {(row["pattern"], row["quant"]): row for row in measured}
    lines = [
        [pattern, *(f"{float(rows[pattern, q]['nll']):.3f} / {float(rows[pattern, q]['kl']):.3f}" for q in kinds)]
        for kinds in [("none", "int8", "fp8")]
        for pattern in ("2:4", "4:6", "6:8", "8:10")
    ]
    return markdown(("", "16 bits", "int8", "fp8"), lines)


def slide24_tuned() -> str:
    """KL of 6:8 and 4:6, pruned and then tuned, means over the seeds, which are counted in brackets."""
    rows = [row for row in result("slide24_quality.csv") if row["samples"] != "default"]
    measured = list({tuple(row[key] for key in ("model", "pattern", "tune", "seed")): row for row in rows}.values())
    models = list(dict.fromkeys(row["model"] for row in measured))
    lines = []
    for pattern in ("6:8", "4:6"):
        for tune, name in (("none", "pruned"), ("bqpo", "after `tune=bqpo`")):
            run = [row for row in measured if (row["pattern"], row["tune"]) == (pattern, tune)]
            of_models = [[row for row in run if row["model"] == model] for model in models]
            lines.append([f"{pattern}, {name}", *(f"{_mean(r, 'kl'):.4f} ({len(r)})" if r else "" for r in of_models)])
    return markdown(("", *models), lines)


def vectors() -> str:
    """Bits per weight and KL by rows per vector."""
    rows = result("vector_lengths.csv")
    lengths = ("1", "4", "16", "32")
    stages = {"sparsegpt": "pruned", "+ bqpo": "after `tune=bqpo`"}
    of = {(row["stage"], row["length"]): row for row in rows}
    lines = [["bits per weight", *(f"{float(of['sparsegpt', length]['bits']):g}" for length in lengths)]]
    lines += [[name, *(f"{float(of[s, length]['kl']):.3f}" for length in lengths)] for s, name in stages.items()]
    return markdown(("rows per vector", *lengths), lines)


def vector_rows() -> str:
    """KL of vectors of 32 rows by the way in which rows were brought together."""
    rows = result("vector_rows.csv")
    models = list(dict.fromkeys(row["model"] for row in rows))
    kl = {(row["model"], row["way"]): f"{float(row['kl']):.3f}" for row in rows}
    ways = dict.fromkeys(row["way"] for row in rows)
    return markdown(("", *models), [[way, *(kl.get((model, way), "") for model in models)] for way in ways])


def search_profile() -> str:
    """KL and CPU seconds of the recipe `rheosparse` by search, a line per model, density and seed."""
    rows = result("search_default.csv")
    methods = ("none", "evolution", "profile")
    runs: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        key = (row["model"], f"{row['kept']}:64", row["seed"])
        runs.setdefault(key, {})[row["search"]] = row
    lines = []
    for key, of_run in runs.items():
        uniform = of_run.get("none")
        cells = [f"{float(uniform['kl']):.3f}" if uniform else ""]
        for method in methods[1:]:
            row = of_run.get(method)
            gain = f" ({100 * (float(row['kl']) / float(uniform['kl']) - 1):+.1f} %)" if row and uniform else ""
            cells.append(f"{float(row['kl']):.3f}{gain}, {row['cpu_seconds']} s" if row else "")
        lines.append([*key, *cells])
    return markdown(("model", "pattern", "seed", *methods), lines)


PAPER_STORAGE = {
    ("float16", "4"): "55.4 % (6.4 %) | 53.5 % (7.4 %) | 41.3 % (30.4 %)",
    ("float16", "8"): "52.0 % (0.8 %) | 49.9 % (0.7 %) | 45.8 % (1.9 %)",
    ("float32", "4"): "40.9 % (6.4 %) | 38.2 % (7.4 %) | 22.7 % (30.4 %)",
    ("float32", "8"): "38.9 % (0.8 %) | 37.3 % (0.7 %) | 33.7 % (1.9 %)",
}
"""Figure 9 and table 2 of the EC-SpMV paper, by dtype and bits per delta."""

STORED = (
    ("random 1024x4096", "banks", "4"),
    ("random 1024x4096", "paper", "4"),
    ("sparsegpt 1024x4096", "banks", "4"),
    ("sparsegpt 1024x4096", "paper", "4"),
    ("pycode-11m", "banks", "4"),
    ("pycode-11m", "paper", "4"),
    ("sparsegpt 1024x4096", "paper", "8"),
    ("random 1024x4096", "paper", "8"),
    ("random 1024x4096", "banks", "8"),
    ("pycode-11m", "paper", "8"),
)
"""Masks, layout and bits per delta of the lines."""


def storage() -> str:
    """Bytes saved against CSR-32, and the share of stored values that are padding."""
    rows = {(r["masks"], r["zeros"], r["dtype"], r["way"]): r for r in result("ec_csr_storage.csv")}
    tables = []
    for dtype, bits in (("float16", "16"), ("float32", "32")):
        lines = []
        for number, (masks, layout, delta) in enumerate(STORED):
            if number in (0, 6):
                lines.append([f"paper, {delta}-bit deltas", *PAPER_STORAGE[dtype, delta].split(" | ")])
            cells = [rows[masks, zeros, dtype, f"ec_csr {layout} {delta}"] for zeros in ("70", "80", "90")]
            shown = [f"{100 * (1 - float(c['of_csr32'])):.1f} % ({100 * float(c['padding']):.1f} %)" for c in cells]
            lines.append([f"{masks.split()[0]}, `{layout}`, {delta}-bit", *shown])
        tables.append(markdown((f"{bits} bits", "70 % zeros", "80 %", "90 %"), lines))
    return "\n\n".join(tables)


def activations() -> str:
    """KL of the same weights with unrounded activations and with activations in 8 bits."""
    rows = result("activations.csv")
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["run"], row["model"]): f"{float(row['kl']):.4f}, {float(row['kl_rounded']):.4f}" for row in rows}
    runs = dict.fromkeys(row["run"] for row in rows)
    return markdown(("", *models), [[run, *(cells.get((run, model), "") for model in models)] for run in runs])


def swaps() -> str:
    """KL with conjugate gradients alone, and with weights exchanged as well."""
    rows = result("pruners_swaps.csv")
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    kl = {(row["model"], row["pattern"], row["method"]): float(row["kl"]) for row in rows}
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for pattern in patterns:
            plain, swapped = (kl.get((model, pattern, f"sparsegpt + gains{way}")) for way in ("", ", swaps"))
            both = f"{plain:.4f}, {swapped:.4f} ({swapped / plain - 1:+.0%})" if plain and swapped else ""
            cells.append(both.replace("%", " %"))
        lines.append([model, *cells])
    return markdown(("", *patterns), lines)


TABLES = {
    "activations": activations,
    "swaps": swaps,
    "pruners": pruners,
    "other-text": other_text,
    "search": search,
    "gqsa": gqsa,
    "codes": codes,
    "slide24-quality": slide24,
    "slide24-tuned": slide24_tuned,
    "search-profile": search_profile,
    "vector-rows": vector_rows,
    "vectors": vectors,
    "ec_csr-storage": storage,
}
