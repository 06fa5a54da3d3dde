"""Compress and pack a model by what a search has chosen, or by a recipe alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.api.finalists import take_best
from semisparse.api.packed_layers import PackedLayers
from semisparse.api.takeover import Kept
from semisparse.compress import (
    Choice,
    FinishedLayer,
    InPlace,
    Journal,
    LayerReport,
    Progress,
    Ranks,
    Recipe,
    TuningResult,
    compress_decoder_layers,
)
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import SearchResult
from semisparse.compress.search.joint import Finalist, JointResult
from semisparse.compress.search.masked import MaskedWeight
from semisparse.compress.search.passing import PassingScorer
from semisparse.compress.search.score import padded_batches, split_sequences
from semisparse.patterns import Pattern, parse_pattern


@dataclass(frozen=True)
class Chosen:
    """What differs from the recipe, layer by layer. Mappings are by module name; empty where the recipe holds for all.

    Args:
        patterns: patterns of a search over densities, or of layers that keep another tool's values.
        choices: of a joint search.
        weights: compressed by a search.
        finalists: assignments to tune and compare with `choices`.
    """

    patterns: Mapping[str, Pattern]
    choices: Mapping[str, Choice]
    weights: Mapping[str, MaskedWeight]
    finalists: Sequence[Finalist]

    @staticmethod
    def of(result: SearchResult | JointResult | None, kept: Mapping[str, Kept]) -> Chosen:
        """Collect what a search has found and what is kept."""
        if isinstance(result, JointResult):
            return Chosen({}, result.choices, result.weights, result.finalists)
        if kept:
            return Chosen({name: parse_pattern(layer.choice.pattern) for name, layer in kept.items()}, {}, {}, ())
        return Chosen(result.patterns, {}, result.weights, ()) if result else Chosen({}, {}, {}, ())


def compress_chosen(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Recipe,
    chosen: Chosen,
    tuning: list[dict[str, Any]],
    *,
    kept: Mapping[str, Kept],
    seed: int,
    device: torch.device,
    progress: Progress,
    mapped: bool,
    ranks: Ranks,
    offload: Path | None,
    journal: Journal | None,
) -> tuple[PackedLayers, dict[str, Any]]:
    """Replace a model's layers by packed ones, and append a report per tuning stage to ``tuning``.

    Returns:
        The packed layers. If finalists were compared, also what that changes in the search's metrics: ``tuned``, the
        KL divergence of each after tuning, ``taken``, the best one's key, and its ``predicted``.
    """
    # A joint search's weights are not tuned: layers are compressed anew, on tuned layers' activations, because the bank
    # lacks some finalists.
    pruned = None if not chosen.weights or (chosen.choices and plan.tune != "none") else chosen.weights
    compress = partial(
        _compress,
        model,
        batches,
        plan,
        seed=seed,
        patterns=chosen.patterns,
        pruned=pruned,
        tuning=tuning,
        device=device,
        progress=progress,
        ranks=ranks,
        offload=offload,
    )
    pack = partial(PackedLayers, model, plan, kept=kept, mapped=mapped)
    if plan.tunes_end_to_end:  # trains all layers together before any is packed
        reports = {report.name: report for report in compress(choices=chosen.choices, store=InPlace(journal))}
        with pack(choices=chosen.choices, journal=None, mapped=False) as packed:
            for index, layer in enumerate(list_decoder_layers(model, plan, {}) if ranks.is_first else ()):
                weights = {name: layer.weight(name) for name in layer.patterns}
                packed.save(index, layer, FinishedLayer(weights, [reports[layer.full_name(name)] for name in weights]))
        return packed, {}
    if not chosen.finalists:
        with pack(choices=chosen.choices, journal=journal) as packed:
            compress(choices=chosen.choices, store=packed)
        return packed, {}
    _, others = split_sequences(batches, plan.search_tokens, seed)
    finalists = {"search": chosen.choices, **{one.label: one.choices for one in chosen.finalists}}
    scorer = PassingScorer(model, padded_batches(others), device, ranks)
    packed, kl, tuned = take_best(finalists, compress, partial(pack, journal=journal), scorer)
    best = min(kl, key=kl.__getitem__)
    tuning += tuned[best]
    predicted = {one.label: {"predicted": dict(one.predicted)} for one in chosen.finalists}
    return packed, {"tuned": kl, "taken": best, **predicted.get(best, {})}


def _compress(*arguments: Any, tuning: list[dict[str, Any]], **options: Any) -> Sequence[LayerReport]:
    """Call `compress_decoder_layers`, and append a report per tuning stage to ``tuning``."""

    def on_tuned(stage: str, result: TuningResult) -> None:
        tuning.append({"stage": stage, **asdict(result)})

    return compress_decoder_layers(*arguments, on_tuned=on_tuned, **options)
