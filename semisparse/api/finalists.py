"""Compare compressed models after tuning: the result of a joint search, and what may be better once it is tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from semisparse.api.packed_layers import PART, PackedLayers
from semisparse.compress import Choice
from semisparse.compress.search.passing import PassingScorer


def take_best(
    finalists: Mapping[str, Mapping[str, Choice]],
    compress: Callable[..., object],
    packed_layers: Callable[..., PackedLayers],
    scorer: PassingScorer,
) -> tuple[PackedLayers, dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Compress a model by each finalist, and put the one with the lowest KL divergence into the model.

    Packed layers of all finalists are held at the same time; of each, one decoder layer is unpacked at a time.

    Args:
        finalists: by label, the choice of each linear layer by module name.
        compress: `compress_decoder_layers` with all arguments but ``choices``, ``store``, ``on_layer`` and ``tuning``,
            a list that takes a report per tuning stage.
        packed_layers: `PackedLayers` with all arguments but ``choices``, ``part`` and ``held_back``.
        scorer: of the model, on calibration sequences that the search was not scored on.
    Returns:
        The best one's layers, and by label the KL divergences in nats per token and the tuning reports.
    """
    packed, kl, tuning = dict[str, PackedLayers](), dict[str, float](), dict[str, list[dict[str, Any]]]()
    for number, (label, choices) in enumerate(finalists.items()):
        tuning[label] = []
        scorer.begin()
        with packed_layers(choices=choices, part=f"{PART}{number or ''}", held_back=True) as layers:
            compress(choices=choices, store=layers, on_layer=scorer.pass_through, tuning=tuning[label])
        packed[label], kl[label] = layers, scorer.mean_kl()
    best = packed[min(kl, key=kl.__getitem__)]
    best.put_into_model()
    return best, kl, tuning
