"""Loss and KL of trained models that are compressed in several ways: a suite of runs, one CSV row per run.

    python benchmarks/quality.py DATA results/pruners.csv pruners --models babyllama-1m --only "pattern=2:4;4:8"

DATA is a directory with ``models/`` and ``text/``. A run has one value of each of the suite's axes; ``--only`` chooses
values. Rows that the CSV already has are not measured again, so that an interrupted run continues. Models are
calibrated on the ``calib`` text and measured on the ``eval`` text. `benchmarks/tables.py` makes the tables in docs/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import mean
from typing import Any

import torch
from models import MODELS, Subject, parser_of
from rows import missing, read_rows, write_rows
from torch import nn
from transformers import PreTrainedModel

from semisparse.nn import weight_of
from semisparse.nn.dequantise import dequantise_layers
from semisparse.quant.group import scales_of

Axis = Mapping[str, tuple[str, ...]]
"""The settings of each value. One without "=" is the recipe; ``{zeros}``, ``{kept}``, ``{eighths}`` are filled in."""

PLAIN = ("refine=none", "order=columns", "target=local")
"""Settings that turn off the additions of ``sparsegpt + gains``: refining kept weights by conjugate gradients, pruning
the windows with the largest loss first, and targets that correct earlier layers' errors. Without them,
``sparsegpt`` differs from ``sparsegpt-published`` in two ways: masks are chosen anew as weights are updated, and in
patterns n:m with m of 16 and more the columns of a window are pruned in the order of their loss."""


@dataclass(frozen=True)
class Suite:
    """Runs that share a recipe and a CSV file.

    Args:
        axes: by the column that names the value. The suite's runs are the product of all axes.
        columns: of the CSV; `figures` has those that are neither ``model`` nor ``seed`` nor an axis.
        settings: of every run, the recipe first.
        models: measured unless others are named.
        samples: calibration sequences; None for the default of `compress`.
        seeds: measured unless others are named.
        dtype: of the activations; None for the one that the device's kernels take.
        dense: whether the packed numbers are multiplied densely, which is faster for long texts.
    """

    axes: Mapping[str, Axis]
    columns: str
    settings: tuple[str, ...]
    models: str
    samples: int | None = 128
    seeds: str = "0,1,2"
    dtype: torch.dtype | None = torch.float32
    dense: bool = False


def _patterns(*patterns: str) -> Axis:
    return {pattern: (f"pattern={pattern}",) for pattern in patterns}


PRUNERS = Suite(
    {
        "pattern": _patterns("2:4", "4:8", "6:8", "32:64", "50%"),
        "method": {
            "magnitude": ("prune=magnitude",),
            "wanda": ("prune=wanda",),
            "sparsegpt-published": ("prune=sparsegpt-published",),
            "sparsegpt": ("prune=sparsegpt", *PLAIN),
            "sparsegpt + gains": ("prune=sparsegpt",),
            "sparsegpt + gains, swaps": ("prune=sparsegpt", "refine=swaps"),
        },
    },
    "model pattern method nll kl dense_nll tokens samples seed device",
    ("rheosparse", "format=bitmask", "search=none"),
    models=",".join(MODELS),
    samples=None,
    seeds="0",
)

ONCE = ("search=none", "pattern={kept}:64", "prune=sparsegpt-published")
SEARCH = Suite(
    {
        "zeros": {"50": (), "62.5": (), "75": ()},
        "method": {
            "uniform n:8": ("pattern={eighths}:8", "search=none"),
            "uniform n:64": ("pattern={kept}:64", "search=none"),
            "rheosparse": ("pattern={kept}:64", "search=rheosparse"),
            "evolution": ("pattern={kept}:64", "search=evolution"),
            "unstructured": ("pattern={zeros}%", "search=none"),
            "uniform n:64 (decided once)": ONCE,
            "evolution (decided once)": (*ONCE, "search=evolution"),
        },
    },
    "model zeros method seed nll kl search_kl search_tokens_run tokens device",
    ("rheosparse", "format=bitmask", *PLAIN, "search_tokens=16384", "search_effort=384", "search_banks=4"),
    models="babyllama-1m,pycode-11m",
)

SEARCH_DEFAULT = Suite(
    {
        "kept": {kept: (f"pattern={kept}:64",) for kept in ("32", "24", "16")},
        "search": {name: (f"search={name}",) for name in ("none", "profile", "evolution", "rheosparse")},
    },
    "model kept search seed samples nll kl uniform_search_kl search_kl cpu_seconds tokens device",
    ("rheosparse",),
    models=",".join(MODELS),
    samples=None,
)

GROUP = ("gqsa",)
KEPT = ("rheosparse", "format=bitmask")
GQSA = Suite(
    {
        "run": {
            "W2 to nearest": (*GROUP, "pattern=g16@0%", "quant=w2", "prune=magnitude", "tune=none"),
            **{f"W{bits} dense": (*GROUP, "pattern=g16@0%", f"quant=w{bits}", "tune=none") for bits in (8, 4, 2)},
            **{f"sparsegpt 2:4{suffix}": (*KEPT, "pattern=2:4", *PLAIN) for suffix in ("", " W4")},
            **{f"bqpo {pattern}": (*KEPT, f"pattern={pattern}", "tune=bqpo") for pattern in ("2:4", "4:8", "32:64")},
            **{f"bqpo {pattern} W4": (*KEPT, f"pattern={pattern}", "tune=bqpo") for pattern in ("2:4", "32:64")},
            **{
                f"{tune} 32:64 in {quant}": (*KEPT, "pattern=32:64", f"tune={tune}", f"quant={quant}")
                for tune, quant in (("bqpo", "w8"), ("bqpo", "w4"), ("bqpo+e2e", "w4"))
            },
            **{
                f"W4S{percent} {stage}": (*GROUP, f"pattern=g16@{percent}%", f"tune={tune}")
                for percent in (20, 30, 40, 50)
                for stage, tune in {"one-shot": "none", "+ bqpo": "bqpo", "+ bqpo + e2e": "bqpo+e2e"}.items()
            },
        }
    },
    "model run seed nll kl bits tokens samples epochs seconds device",
    ("gqsa", "search=none", "tune_epochs=10"),
    models="babyllama-1m,pycode-11m",
)
"""Runs that end in "W4" round kept weights to nearest afterwards; runs that end in "in w4" or "in w8" store codes."""

EQUAL_BYTES = Suite(
    {
        "run": {
            "W2 g32": ("dense-w2", "pattern=g32@0%"),
            "W4S50 g16": ("gqsa", "pattern=g16@50%"),
            "W3 g128": ("dense-w3", "pattern=g128@0%"),
            "2:4 W4": ("rheosparse", "pattern=2:4", "quant=w4", "search=none"),
            "32:64 W4": ("rheosparse", "pattern=32:64", "quant=w4", "search=none"),
            "W4S40 g16": ("gqsa", "pattern=g16@40%"),
        },
        "tune": {tune: (f"tune={tune}",) for tune in ("bqpo+e2e", "bqpo")},
    },
    "model run seed nll kl bits tokens samples tune seconds device",
    ("gqsa",),
    models="babyllama-1m,stories260k",
    dense=True,
)
"""Two classes of bytes: some 2.85 bits per weight, and some 3.3."""

ACTIVATIONS = Suite(
    {
        "run": {
            "W4A8": ("dense-w4", "quant=w4a8"),
            "W4A8S50": ("gqsa", "quant=w4a8"),
            **{
                f"{pattern} {quant}": ("slidesparse", f"pattern={pattern}", f"quant={quant}")
                for quant in ("int8", "fp8")
                for pattern in ("2:4", "6:8")
            },
        }
    },
    "model run seed kl kl_rounded nll nll_rounded tokens samples device",
    ("gqsa", "tune=bqpo"),
    models="stories260k,babyllama-1m",
    seeds="0",
    dense=True,
)
"""What rounding activations adds: ``*_rounded`` is measured with the kernels that round x to 8 bits, the rest with the
same weights, multiplied by unrounded activations."""

SLIDE24 = Suite(
    {
        "pattern": _patterns("2:4", "4:6", "6:8", "8:10"),
        "quant": {kind: (f"quant={kind}",) for kind in ("none", "int8", "fp8")},
        "tune": {"none": ("tune=none",), "bqpo": ("tune=bqpo",)},
    },
    "model pattern quant tune nll kl dense_nll tokens samples seed device",
    ("slidesparse",),
    models="pycode-11m",
    samples=None,
    seeds="0",
    dtype=None,
)

VECTOR_LENGTHS = Suite(
    {
        "length": {length: (f"pattern=16:32v{length}",) for length in ("1", "4", "16", "32")},
        "stage": {"sparsegpt": ("tune=none",), "+ bqpo": ("tune=bqpo",)},
    },
    "model length stage nll kl bits tokens samples epochs seed seconds device first_outcome",
    ("nm-spmm", "tune_epochs=10"),
    models="pycode-11m",
    seeds="0",
)
"""``first_outcome`` is the outcome of the first layer: tuning that does not lower the held-out loss is undone."""

SUITES = {
    "pruners": PRUNERS,
    "search": SEARCH,
    "search_default": SEARCH_DEFAULT,
    "gqsa": GQSA,
    "equal_bytes": EQUAL_BYTES,
    "activations": ACTIVATIONS,
    "slide24_quality": SLIDE24,
    "vector_lengths": VECTOR_LENGTHS,
}


def settings_of(suite: Suite, run: Mapping[str, str], more: list[str]) -> tuple[str, list[str]]:
    """Return the recipe and the settings of a run; of several values of a key, the last one counts."""
    numbers: dict[str, Any] = {}
    if "zeros" in run:
        kept = round(64 * (1 - float(run["zeros"]) / 100))
        numbers = {"zeros": run["zeros"], "kept": kept, "eighths": kept // 8}
    words = [*suite.settings, *(word for axis, values in suite.axes.items() for word in values[run[axis]]), *more]
    recipe = [word for word in words if "=" not in word][-1]
    keys = dict(word.format(**numbers).split("=", 1) for word in words if "=" in word)
    return recipe, [f"{key}={value}" for key, value in keys.items()]


_SUBJECTS: dict[str, Subject] = {}
"""The model of the last run of this process."""


def measure(run: Mapping[str, str], options: argparse.Namespace) -> dict[str, str]:
    """Compress and evaluate one model; return the CSV row."""
    suite = SUITES[options.suite]
    if run["model"] not in _SUBJECTS:
        _SUBJECTS.clear()
        _SUBJECTS[run["model"]] = Subject(run["model"], options)
    subject = _SUBJECTS[run["model"]]
    recipe, settings = settings_of(suite, run, options.set)
    started = time.process_time()
    model, report = subject.compress(recipe, settings, int(run["seed"]))
    cpu_seconds, bits = time.process_time() - started, mean(layer["bits_per_weight"] for layer in report.layers)
    if run.get("run", "").endswith(" W4") and suite is GQSA:
        bits = _round_kept(model, [layer["name"] for layer in report.layers])
    columns = suite.columns.split()
    rounded = subject.measure(model) if "kl_rounded" in columns else None
    if suite.dense:
        dequantise_layers(model, subject.dtype)
    search, dtype = report.search or {}, (torch.float32, torch.bfloat16)[subject.device.type == "cuda"]
    quality = subject.measure(model, suite.dtype or dtype)
    figures: dict[str, Any] = {
        **{"nll": quality.nll, "kl": quality.kl, "tokens": quality.tokens, "bits": bits},
        **{"seconds": round(report.seconds), "cpu_seconds": f"{cpu_seconds:.0f}", "device": subject.device.type},
        **{"search_kl": search.get("kl", ""), "search_tokens_run": search.get("tokens", "")},
        "uniform_search_kl": search.get("uniform_kl", ""),
        "epochs": next((word.partition("=")[2] for word in settings if word.startswith("tune_epochs=")), ""),
        "samples": options.samples or "default",
        "first_outcome": next(iter(report.layers))["outcome"],
    }
    if rounded:
        figures |= {"kl_rounded": rounded.kl, "nll_rounded": rounded.nll}
    if "dense_nll" in columns:
        figures["dense_nll"] = subject.dense_nll
    return {column: str({**figures, **run}[column]) for column in columns}


def _round_kept(model: PreTrainedModel, names: list[str]) -> float:
    """Round kept weights to 4 bits in groups of 16 along K; return the bits per weight of a format that stores them."""
    for name in names:
        layer = model.get_submodule(name)
        weight = layer.weight
        rounded = scales_of(weight, 4, 16, weight.dtype).rounded(weight).masked_fill(weight == 0, 0)
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=weight.dtype)
        weight_of(dense).copy_(rounded)
        if layer.bias is not None:
            dense.bias = layer.bias
        model.set_submodule(name, dense)
    return 4 / 2 + 1 + 24 / 16


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--models", help="comma-separated")
    parser.add_argument("--seeds", help="comma-separated")
    parser.add_argument("--only", action="append", default=[], help="COLUMN=VALUE;VALUE: the values of an axis")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE: one more setting of every run")
    parser.add_argument("--jobs", type=int, default=1, help="processes; small models leave a GPU idle")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    options.samples = options.samples or suite.samples
    only = {key: values.split(";") for key, _, values in (word.partition("=") for word in options.only)}
    wanted = {
        "seed": (options.seeds or suite.seeds).split(","),
        "model": (options.models or suite.models).split(","),
        **{axis: only.get(axis, list(values)) for axis, values in suite.axes.items()},
    }
    rows = read_rows(options.csv)
    runs = [dict(zip(wanted, key, strict=True)) for key in missing(rows, **wanted)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(measure, run, options) for run in runs]
        try:
            for finished in as_completed(futures):
                rows.append(finished.result())
                write_rows(options.csv, rows, suite.columns.split())
                print(*rows[-1].values(), flush=True)
        except BaseException:  # otherwise the exit would wait for all other runs
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
