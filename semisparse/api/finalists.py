"""Compare two compressed models after tuning: the result of a joint search, and one choice for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semisparse.api.packed_layers import PART, PackedLayers
from semisparse.compress import Choice
from semisparse.compress.search.passing import PassingScorer

SCORED = 2
"""Tokens that finalists are scored on, as a multiple of the recipe's `search_tokens`."""


def take_best(
    finalists: Sequence[Mapping[str, Choice]],
    compress: Callable[..., object],
    packed_layers: Callable[..., PackedLayers],
    scorer: PassingScorer,
) -> tuple[PackedLayers, list[float], list[list[dict[str, Any]]]]:
    """Compress a model by each finalist, and put the one with the lowest KL divergence into the model.

    Packed layers of all finalists are held at the same time; of each, one decoder layer is unpacked at a time.

    Args:
        finalists: the choice of each linear layer, by module name.
        compress: `compress_decoder_layers` with all arguments but ``choices``, ``store``, ``on_layer`` and ``tuning``,
            a list that takes a report per tuning stage.
        packed_layers: `PackedLayers` with all arguments but ``choices``, ``part`` and ``held_back``.
        scorer: of the model, on tokens that no finalist was selected by.
    Returns:
        The best one's layers, and for each finalist its KL divergence in nats per token and its tuning reports.
    """
    packed, kl, tuning = list[PackedLayers](), list[float](), list[list[dict[str, Any]]]()
    for number, choices in enumerate(finalists):
        tuning.append([])
        scorer.begin()
        with packed_layers(choices=choices, part=f"{PART}{number or ''}", held_back=True) as layers:
            compress(choices=choices, store=layers, on_layer=scorer.pass_through, tuning=tuning[-1])
        packed.append(layers)
        kl.append(scorer.mean_kl())
    best = packed[kl.index(min(kl))]
    best.put_into_model()
    return best, kl, tuning
