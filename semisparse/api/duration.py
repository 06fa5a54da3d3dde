"""How long a compression takes on a GPU, from the operations of its matmuls, before it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from semisparse.api.layer_times import LayerTimes
from semisparse.bench.machines import Machine
from semisparse.compress import Ranks, Recipe
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.prune.sparsegpt import UPDATE_COLUMNS
from semisparse.compress.recipe import STORED
from semisparse.compress.search import ALGORITHMS, PROFILE_TOKENS
from semisparse.compress.search.anew import TOGETHER
from semisparse.compress.search.losses import PROBED
from semisparse.compress.search.profile import LEAST_STEPS, MAX_STEPS, REACH, first_candidates
from semisparse.compress.search.space import search_space
from semisparse.compress.trace import expert_of
from semisparse.compress.tune.training import EVALUATIONS, HELD_OUT, PATIENCE, STEP_TOKENS
from semisparse.patterns import NM, Pattern

FORWARDS = 2.4, 4
"""Forwards of a decoder layer's linear layers and of its attention, per model that runs. Linear layers: once whole, and
in parts until each of their inputs, 2.36 in Llama. Attention: until the inputs of its output layer, of the MLP and of
the MLP's last layer, and once whole."""

BESIDE = 1.6, 3
"""The same of a candidate that is pruned side by side with others: in Llama until the inputs of three linear layers
1.35, and the last linear layer on its inputs .22."""

SHARED = 1, 1
"""The same of the dense model that such candidates share."""

CHOICES = 13
"""Choices of a joint search that are left after its first look, of 29: for a limit on bits (results/h200/bank-ways.csv,
bank `first`: 12 beside dense)."""

LATER = 2.5
"""Choices per linear layer that are left for the second bank: 140 candidates and at most 96 proposals for 56 linear
layers (results/h200/compressing.csv, `auto bits=3`)."""

WAY_SECONDS = 1.1e-9
"""Compressing a weight by one more choice: 2.7 s for 12 choices of the 202 million weights of a decoder layer
(results/h200/bank-ways.csv, build `fit kernel`, bank `first`)."""

PROBE_SECONDS = 4.6e-3
"""The first look, per column of the linear layers that it compresses in every way: 38 s for 8,192
(results/h200/bits3-marks.csv). Patterns whose columns are pruned one by one take most of it."""

UNPACKING_SECONDS = 5.4e-11
"""Expanding a weight of a bank for a candidate: 13 candidates of eight decoder layers took 1.77 s
(results/h200/bits3-marks.csv), 0.64 of it for matmuls."""

MOST_TUNED = 3
"""Models that ``tune=bqpo`` trains after a joint search at most, to compare them: its result and two finalists."""


class Span(NamedTuple):
    """Seconds that something takes at least and at most."""

    least: float
    most: float

    @staticmethod
    def of(seconds: float) -> Span:
        """Return the span of something whose amount is known."""
        return Span(seconds, seconds)

    def plus(self, least: float, most: float | None = None) -> Span:
        """Return the sum with something else; without ``most`` the amount of that is known."""
        return Span(self.least + least, self.most + (least if most is None else most))


def seconds_on_gpu(
    layers: Sequence[DecoderLayer],
    plan: Recipe,
    batches: Sequence[Tensor],
    machine: Machine | None,
    ranks: Ranks,
    streams: bool = False,
) -> Span | None:
    """Return about how many seconds a compression takes, beside reading the model, writing and checking the result.

    None where it is not known: on a CPU and on GPUs that gpus.yaml lacks; for recipes that tune end to end or round in
    groups, but for joint searches whose targets are bits; for other patterns than n:m that a kernel prunes; with
    experts; and for candidates that are scored with one decoder layer at a time.

    Args:
        layers: the decoder layers.
        plan: the recipe.
        batches: calibration token ids, each [batch, tokens] int64.
        machine: the GPU that compresses.
        ranks: the processes.
        streams: as in `search_patterns`.
    """
    if machine is None or machine.device != "cuda" or not batches or streams or not _is_known(layers, plan):
        return None
    tokens, length = sum(batch.numel() for batch in batches), max(batch.shape[1] for batch in batches)

    def times_on(tokens: int) -> list[LayerTimes]:
        return [LayerTimes(layer, tokens, length, machine, ranks.count) for layer in layers]

    layer_times = times_on(tokens)
    forwards = sum(_compressing(times, plan) for times in layer_times)
    compressing = forwards + sum(times.pruning() for times in layer_times)
    kept = forwards if plan.tune != "none" else 0.0  # after a search that keeps the best candidate's weights
    scored = min(tokens, max(length, plan.search_tokens))
    if plan.search == "none":
        span = Span.of(compressing)
    elif plan.search == "profile" and tokens > PROFILE_TOKENS:
        span = _candidates(layers, *_side_by_side(times_on(PROFILE_TOKENS), plan)).plus(compressing)
    elif plan.search == "profile":
        span = _candidates(layers, compressing, 0.0).plus(kept)
    elif plan.search == "joint":
        span = Span.of(_joint(layer_times, plan, scored))
    else:
        span = Span.of(_over_banks(layers, layer_times, plan, scored)).plus(kept)
    if plan.tune == "none":
        return span
    training = _training(layer_times, plan, tokens, length)
    if plan.search != "joint":
        return span.plus(*training)
    # The bank lacks some finalists: each model is compressed anew.
    return span.plus(compressing + training.least, MOST_TUNED * (compressing + training.most))


def duration(span: Span | None) -> str:
    """Return the end of a sentence on what a compression takes; empty if its time is not known."""
    if span is None:
        return ""
    unit, name = (60, "minutes") if span.most >= 90 else (1, "s")
    least, most = (f"{seconds / unit:.0f}" for seconds in span)
    return f"; the GPU works for some {most if least == most else f'{least} to {most}'} {name}"


def _is_known(layers: Sequence[DecoderLayer], plan: Recipe) -> bool:
    """Return whether the times of all its parts were measured."""
    linears = [(layer, name) for layer in layers for name in layer.patterns]
    by_sparsegpt = plan.prune == "sparsegpt" and plan.saliency == "loss" and plan.refine == "cg"
    tuned = plan.tune == "none" or (plan.tune == "bqpo" and plan.tune_units == "layers")
    if not by_sparsegpt or not tuned or plan.code_bits or any(expert_of(name) for _, name in linears):
        return False
    if plan.search == "joint":
        return plan.format == "auto" and plan.chooses_each_linear and all(key in STORED for key, _ in plan.targets)
    return all(_is_pruned_by_a_kernel(layer.patterns[name]) for layer, name in linears)


def _is_pruned_by_a_kernel(pattern: Pattern) -> bool:
    return isinstance(pattern, NM) and pattern.window.bit_count() == 1 and pattern.window <= UPDATE_COLUMNS


def _compressing(times: LayerTimes, plan: Recipe) -> float:
    """Return the seconds of compressing a decoder layer, without those of pruning."""
    models = 2 if plan.target == "residual" else 1
    linears, attention = FORWARDS
    return times.forwards(models * linears, models * attention) + times.sums(models) + times.copying()


def _training(layer_times: Sequence[LayerTimes], plan: Recipe, tokens: int, length: int) -> Span:
    """Return the seconds of ``tune=bqpo``, of one model and on one GPU: it may stop early."""
    each = max(length, STEP_TOKENS)
    steps = plan.tune_epochs * math.ceil((1 - HELD_OUT) * tokens / each)
    seconds = steps * sum(times.training_step(each) for times in layer_times)
    return Span(seconds * PATIENCE / EVALUATIONS, seconds)


def _side_by_side(layer_times: Sequence[LayerTimes], plan: Recipe) -> tuple[float, float]:
    """Return the seconds of one of several candidates that are pruned side by side, and those that they share."""
    models = 2 if plan.target == "residual" else 1
    own = sum(times.forwards(*BESIDE) + times.sums(models) + times.pruning() for times in layer_times)
    shared = sum((times.forwards(*SHARED) if models == 2 else 0.0) + times.copying() for times in layer_times)
    return own, shared


def _candidates(layers: Sequence[DecoderLayer], own: float, shared: float) -> Span:
    """Return the seconds of the candidates of ``search=profile``, of which up to `TOGETHER` share some."""
    first = first_candidates(search_space(layers, REACH, lambda _: True))
    together = first * own + math.ceil(first / TOGETHER) * shared
    return Span(together + LEAST_STEPS * (own + shared), together + MAX_STEPS * (own + shared))


def _over_banks(layers: Sequence[DecoderLayer], layer_times: Sequence[LayerTimes], plan: Recipe, scored: int) -> float:
    """Return the seconds of ``search=evolution`` and ``rheosparse``: banks of all levels, and scored candidates."""
    algorithm = ALGORITHMS[plan.search]
    space = search_space(layers, algorithm.reach(plan), lambda _: True)
    seconds = 0.0
    for number in range(algorithm.passes(plan)):
        levels = [0] * len(layers)
        for linear in algorithm.pass_space(space, (0,) * len(space), number, plan):
            levels[linear.decoder_layer] = max(levels[linear.decoder_layer], len(linear.patterns))
        for times, count in zip(layer_times, levels, strict=True):
            seconds += _compressing(times, plan) + times.pruning(count) + times.copying()  # the last for the scorer
    return seconds + plan.search_effort * sum(times.forwards(1, 1, scored) for times in layer_times)


def _joint(layer_times: Sequence[LayerTimes], plan: Recipe, scored: int) -> float:
    """Return the seconds of a joint search for a number of bits.

    A choice of one linear layer is scored from its decoder layer on, through half of the model on average. A proposal
    changes half of the weights.
    """
    linears = sum(len(times.shapes) for times in layer_times)
    weights = sum(times.weights for times in layer_times)
    columns = sorted((n * k, k) for n, k in layer_times[0].shapes.values())
    seconds = PROBE_SECONDS * sum(k for _, k in columns[:PROBED])
    local = replace(plan, target="local")
    for choices, recipe in ((CHOICES, local), (LATER, plan)):
        seconds += sum(_compressing(times, recipe) + times.copying() for times in layer_times)
        seconds += WAY_SECONDS * (choices - 1) * weights
    forward = sum(times.forwards(1, 1, scored) for times in layer_times)
    seconds += (CHOICES + LATER - 2) * linears * forward / 2
    unpacking = UNPACKING_SECONDS * weights
    return seconds + CHOICES * (forward + unpacking) + plan.search_effort * (forward + unpacking / 2)
