"""Convert targets to limits on the total costs of a model's layers; compute what each choice for a layer costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from semisparse.bench.machines import Machine, find_machine
from semisparse.bench.roofline import BASELINE, Candidate, estimate_matmul, modelled, problem_for
from semisparse.bench.step import beside_seconds, in_engine
from semisparse.compress import Choice, Option, Recipe
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search.units import OptionsOf
from semisparse.errors import InputError, RecipeError
from semisparse.formats.base import registry
from semisparse.patterns import NO_ZEROS, Group, parse_pattern
from semisparse.quant.symmetric import DTYPES

WORKLOADS = {"decode": 1, "batch32": 32, "prompt": 2048}
"""Tokens M of each target that is a speed-up."""

Beside = Mapping[str, float]
"""Workload -> seconds per weight that a step takes beside the matmuls of its layers."""


def parse_targets(settings: Iterable[str]) -> dict[str, str]:
    """Split ``bits=3.0`` and the like into keys and values.

    Raises:
        RecipeError: a setting has another form, or a key is given twice.
    """
    targets: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key.strip() in targets:
            problem = "given twice" if equals else "not written KEY=VALUE"
            raise RecipeError(f"target {setting!r} is {problem}; write for example --target bits=3.0")
        targets[key.strip()] = value.strip()
    return targets


def limits_of(targets: Mapping[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Return each cost's upper limit, as a fraction of dense ``dtype`` weights' cost; both are sums over all layers."""
    limits = {key: 1 / value for key, value in targets.items() if key in WORKLOADS}
    stored = [targets["bits"] / (8 * dtype.itemsize)] if "bits" in targets else []
    stored += [targets["size"]] if "size" in targets else []
    return limits | ({"bits": min(stored)} if stored else {})


def check_targets(targets: Mapping[str, float], dtype: torch.dtype) -> None:
    """Refuse targets that ask for nothing.

    Raises:
        InputError: dense ``dtype`` weights have fewer bits than asked for, or reach all targets.
    """
    dense, bits = 8 * dtype.itemsize, targets.get("bits", 0.0)
    if bits > dense:
        raise InputError(f"target bits={bits:.4g} is more than a dense weight's {dense} bits: ask for fewer")
    if all(limit >= 1 for limit in limits_of(targets, dtype).values()):
        raise InputError(
            f"the dense model reaches {written(targets)} as it is: ask for fewer than {dense} bits, for a size below 1 "
            "or for a speed-up above 1x"
        )


def reached(targets: Mapping[str, float], relative: Mapping[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Convert totals relative to dense into the units of the targets."""
    values = {"size": relative["bits"], "bits": relative["bits"] * 8 * dtype.itemsize}
    values |= {key: 1 / relative[key] for key in WORKLOADS if key in relative}
    return {key: values[key] for key in targets}


def machine_of(recipe: Recipe) -> Machine | None:
    """Return the machine that a recipe names, or this one if a target is a speed-up; else None.

    Raises:
        InputError: its name is unknown.
    """
    needed = recipe.gpu != "auto" or any(key in WORKLOADS for key, _ in recipe.targets)
    return find_machine(recipe.gpu) if needed else None


def written(targets: Mapping[str, float]) -> str:
    """Write targets as a user does, such as ``bits=3, decode=2.5x``."""
    return ", ".join(f"{key}={value:.4g}{'x' if key in WORKLOADS else ''}" for key, value in targets.items())


def menu(recipe: Recipe, *, rounds_activations: bool) -> list[Choice]:
    """List the choices of pattern, bits and format for a layer in a joint search, dense first.

    Args:
        recipe: if its `format` is not ``auto``, only that format's choices are listed beside dense.
        rounds_activations: whether choices that quantise activations to 8 bits are allowed. They pay only on a GPU
            and for many tokens, and the search does not measure what quantising activations loses.
    """
    formats = [form for form in registry().values() if recipe.format in ("auto", form.name)]
    listed = [Choice(pattern, quant, form.name) for form in formats for pattern, quant in form.choices]
    dense = Choice(NO_ZEROS, "none", BASELINE)
    return [dense, *(c for c in listed if c != dense and (rounds_activations or c.quant not in DTYPES))]


def beside_layers(config: Any, weights: int, workloads: Iterable[str], dtype: torch.dtype, machine: Machine) -> Beside:
    """Return the predicted seconds of a decode step or prompt beside its layers, per weight of these layers.

    The costs of each layer's options include its share, so that a target is a speed-up of the whole step. In proportion
    to the weights, the shares add up to the same whatever the layers are grouped into.

    Args:
        config: of the model.
        weights: number of weights of the layers that a choice is made for.
        workloads: keys of `WORKLOADS`.
        dtype: of weights and activations.
        machine: that times are predicted for.
    """
    steps = {name: beside_seconds(config, WORKLOADS[name], name == "prompt", dtype, machine) for name in workloads}
    return {name: seconds / max(1, weights) for name, seconds in steps.items()}


def options_of(
    choices: Sequence[Choice],
    workloads: Iterable[str],
    dtype: torch.dtype,
    machine: Machine | None,
    beside: Beside | None = None,
) -> Callable[[Sequence[tuple[int, int]]], list[Option]]:
    """Return a function that takes the shapes [N, K] of linear layers that share an input and returns their options.

    Args:
        choices: the first is dense.
        workloads: keys of `WORKLOADS` whose seconds are costs.
        dtype: of weights and activations.
        machine: the machine that times are predicted for; needed if there are workloads.
        beside: of `beside_layers`; None if the time of the layers alone is wanted.
    """
    names, shared = tuple(workloads), beside or {}
    candidates = [_candidate(choice) for choice in choices]

    @lru_cache(maxsize=1024)
    def costs(choice: Choice, shapes: tuple[tuple[int, int], ...]) -> Mapping[str, float] | None:
        candidate = _candidate(choice)
        columns = shapes[0][1]
        try:
            bits = sum(8 * problem_for(candidate, 1, n, k, dtype, "cpu")[1] for n, k in shapes)
            rows = sum(n for n, _ in shapes)  # one launch for all
            times = {
                name: _seconds(candidate, candidates, WORKLOADS[name], rows, columns, dtype, machine)
                + shared.get(name, 0.0) * rows * columns
                for name in names
                if machine is not None
            }
        except InputError:
            return None  # the format cannot store such a layer, or the machine has no unit for its operations
        return {"bits": bits, **times}

    def options(shapes: Sequence[tuple[int, int]]) -> list[Option]:
        listed = []
        for choice in choices:
            pattern = parse_pattern(choice.pattern)
            if isinstance(pattern, Group) and pattern.size > shapes[0][1]:
                continue  # groups longer than a row store padding
            cost = costs(choice, tuple(shapes))
            if cost is not None:
                listed.append(Option(choice, cost))
        return listed

    return options


def options_for(
    model: PreTrainedModel, recipe: Recipe, workloads: Sequence[str], machine: Machine | None, *, rounds: bool
) -> OptionsOf:
    """Return `options_of` for a model's layers, with the seconds of whole steps if there is a machine.

    Args:
        model: not yet compressed.
        recipe: says which layers are compressed, and by which formats.
        workloads: keys of `WORKLOADS` whose seconds are costs.
        machine: that times are predicted for.
        rounds: `menu`'s ``rounds_activations``.
    """
    layers = list_decoder_layers(model, recipe, {})
    weights = sum(layer.weight(name).numel() for layer in layers for name in layer.patterns)
    beside = beside_layers(model.config, weights, workloads, model.dtype, machine) if machine else {}
    return options_of(menu(recipe, rounds_activations=rounds), workloads, model.dtype, machine, beside)


def _candidate(choice: Choice) -> Candidate:
    return Candidate(choice.format, choice.pattern, {} if choice.quant == "none" else {"kind": choice.quant})


def _seconds(
    candidate: Candidate,
    candidates: Sequence[Candidate],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    machine: Machine,
) -> float:
    """Return the predicted time that a matmul adds to a step of the engine.

    A time that the roofline model predicts is corrected by the median ratio of measured to predicted time over the
    other patterns of the same format and bits. Without this, a pattern that was not measured can seem faster than a
    sparser one that was: 48:64 than 32:64 in 4 bits (4096 x 4096, 32 tokens, H200).
    """
    estimate, _ = estimate_matmul(candidate, m, n, k, dtype, machine)
    if estimate.measured or candidate.is_baseline:
        return in_engine(candidate, estimate.seconds, m, dtype, machine)
    errors = []
    for other in candidates:
        is_alike = (other.format, other.options) == (candidate.format, candidate.options)
        if is_alike and other.pattern != candidate.pattern:
            timed, _ = estimate_matmul(other, m, n, k, dtype, machine)
            if timed.measured:
                errors.append(timed.seconds / modelled(other, m, n, k, dtype, machine).seconds)
    return in_engine(candidate, estimate.seconds * (median(errors) if errors else 1.0), m, dtype, machine)
