"""What dense low bits of the same bytes would keep, so that a recipe says when it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from semisparse.api.recipe import read_recipe, recipes
from semisparse.bench.roofline import Candidate, problem_for
from semisparse.compress import Progress, Recipe
from semisparse.compress.propagate import list_decoder_layers
from semisparse.nn import weight_of
from semisparse.patterns import Group, Pattern, parse_pattern
from semisparse.quant.group import fake_quantise, scales_of

TOKENS = (64, 512)
"""Fewest and most calibration tokens that models are compared on."""

OPERATIONS = 1e12
"""Multiply-adds to spend on a forward, within `TOKENS`: some 30 s on two cores without instructions for bfloat16."""


@dataclass(frozen=True)
class Rival:
    """Dense low bits, rounded to nearest, beside a compressed model.

    Args:
        recipe: the recipe that stores them.
        bits: stored bits per weight.
        kl: KL(dense || rounded), in nats per token.
        own_kl: KL(dense || compressed) on the same tokens; NaN until there is a compressed model.
        tokens: number of these tokens.
    """

    recipe: str
    bits: float
    kl: float
    own_kl: float
    tokens: int


class Rivals:
    """Dense low-bit models of the layers that a recipe compresses, measured before it changes them.

    Args:
        model: dense.
        plan: the recipe.
        batches: calibration token ids, each [batch, tokens] int64.
        progress: called with (stage, recipes measured, all recipes).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Recipe,
        batches: Sequence[Tensor],
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        found = list_decoder_layers(model, plan, {})
        layers = [layer.module.get_submodule(linear) for layer in found for linear in layer.patterns]
        wanted = int(OPERATIONS / max(1, sum(weight_of(layer).numel() for layer in layers)))
        self._sequences = _first_sequences(batches, min(max(wanted, TOKENS[0]), TOKENS[1]))
        self._dense = [_log_probabilities(model, ids) for ids in self._sequences]
        self._rivals: list[Rival] = []
        dense = _dense_recipes()
        for name, recipe in dense.items():
            progress("measuring dense low bits", len(self._rivals), len(dense))
            self._rivals.append(self._measured(model, layers, name, recipe))

    def better_than(self, model: PreTrainedModel, bits: float) -> dict[str, Any] | None:
        """Return the best rival of at most as many bits per weight if it keeps more than the compressed model."""
        own = self._kl(model)
        able = [rival for rival in self._rivals if rival.bits <= bits and rival.kl < own]
        return asdict(replace(min(able, key=lambda rival: rival.kl), own_kl=own)) if able else None

    @property
    def _tokens(self) -> int:
        return sum(ids.shape[1] - 1 for ids in self._sequences)

    def _measured(self, model: PreTrainedModel, layers: Sequence[nn.Module], name: str, recipe: Recipe) -> Rival:
        bits, size = int(recipe.quant.removeprefix("w")), parse_pattern(recipe.pattern).step
        with _weights_as(layers, partial(_rounded, bits=bits, size=size)):
            return Rival(name, _bits(recipe, layers, model.dtype), self._kl(model), math.nan, self._tokens)

    def _kl(self, model: PreTrainedModel) -> float:
        total = 0.0
        for ids, dense in zip(self._sequences, self._dense, strict=True):
            found = _log_probabilities(model, ids)
            total += F.kl_div(found, dense, log_target=True, reduction="sum").item()
        return total / max(1, self._tokens)


def _dense_recipes() -> dict[str, Recipe]:
    """Return the built-in recipes that prune nothing and store low bits in groups, by name."""
    named = {name: read_recipe(name) for name, settings in recipes().items() if "quant" in settings}
    return {name: recipe for name, recipe in named.items() if _is_dense(parse_pattern(recipe.pattern))}


def _is_dense(pattern: Pattern) -> bool:
    return isinstance(pattern, Group) and pattern.percent == 0


def _bits(recipe: Recipe, layers: Sequence[nn.Module], dtype: torch.dtype) -> float:
    """Return the bits per weight that a recipe stores these layers in."""
    candidate = Candidate(recipe.format, recipe.pattern, {"kind": recipe.quant})
    shapes = [weight_of(layer).shape for layer in layers]
    stored = sum(problem_for(candidate, 1, n, k, dtype, "cpu")[1] for n, k in shapes)
    return 8 * stored / sum(n * k for n, k in shapes)


def _rounded(weight: Tensor, bits: int, size: int) -> Tensor:
    """Return a weight [N, K] rounded to nearest in groups of ``size``, in its dtype."""
    scales = scales_of(weight, bits, size, weight.dtype)
    return fake_quantise(weight.float(), scales.scale.float(), scales.zero.float(), bits, size).to(weight.dtype)


@contextmanager
def _weights_as(layers: Sequence[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the weight of each layer while it runs: one layer's changed weight is in memory at a time."""
    kept: dict[nn.Module, Tensor] = {}

    def before(layer: nn.Module, args: Any) -> None:
        kept[layer] = weight_of(layer).clone()
        weight_of(layer).copy_(change(kept[layer]))

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        weight_of(layer).copy_(kept.pop(layer))

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_sequences(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return the first calibration sequences, [1, tokens] each, of ``tokens`` tokens together."""
    found: list[Tensor] = []
    for sequence in (row for batch in batches for row in batch):
        left = tokens - sum(ids.shape[1] for ids in found)
        if left < 2:
            break
        found.append(sequence[None, :left])
    return found


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log-probabilities of every token but the first, [tokens - 1, vocabulary] float32."""
    training = model.training
    logits = model.eval()(ids.to(model.device), use_cache=False).logits[0, :-1].float()
    model.train(training)
    return logits.log_softmax(-1)
