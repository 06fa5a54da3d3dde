"""Compare a compressed model with dense low-bit models of no more bits per weight; report a better one (lower KL)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from semisparse.compress.decoder import copy_to, decoder_layers, logits_after, record_calls
from semisparse.compress.layers import DecoderLayer, list_decoder_layers
from semisparse.formats import Packed
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import weight_of
from semisparse.patterns import Group, Pattern, parse_pattern
from semisparse.quant.group import fake_quantise, scales_of

TOKENS = (64, 512)
"""Minimum and maximum number of calibration tokens that models are compared on."""

OPERATIONS = 1e12
"""Budget of multiply-adds per forward pass: divided by the number of weights, it gives the tokens, within `TOKENS`.

A forward pass of so many takes 30 s on two cores without bfloat16 instructions.
"""


@dataclass(frozen=True)
class Rival:
    """A dense low-bit model, rounded to nearest, compared with a compressed model.

    Args:
        recipe: name of the recipe that stores this model.
        bits: stored bits per weight.
        kl: KL(uncompressed model || this model), in nats per token.
        own_kl: KL(uncompressed model || compressed model) on the same tokens; NaN until there is a compressed model.
        tokens: number of predicted tokens that both are averaged over.
    """

    recipe: str
    bits: float
    kl: float
    own_kl: float
    tokens: int


class Rivals:
    """Dense low-bit rivals of a compressed model: the linear layers that a recipe compresses, rounded to nearest.

    Their KL is measured when this is created, before the recipe changes the model.

    Args:
        model: not yet compressed.
        plan: the recipe.
        batches: calibration token ids, each [batch, tokens] int64.
        device: where one decoder layer at a time runs.
        progress: called with (stage, decoder layers measured, all decoder layers).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Recipe,
        batches: Sequence[Tensor],
        device: torch.device,
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        layers = list_decoder_layers(model, plan, {})
        linears = [weight_of(layer.module.get_submodule(linear)) for layer in layers for linear in layer.patterns]
        wanted = int(OPERATIONS / max(1, sum(weight.numel() for weight in linears)))
        self._sequences = _first_sequences(batches, min(max(wanted, TOKENS[0]), TOKENS[1]))
        self._device = device
        recipes = _dense_recipes()
        report = partial(progress, "measuring dense low bits")
        log_probabilities = self._log_probabilities(model, layers, [None, *recipes.values()], report)
        self._dense = next(log_probabilities)
        self._rivals = [
            Rival(name, _bits(recipe, linears, model.dtype), self._kl(rounded), math.nan, self._tokens)
            for (name, recipe), rounded in zip(recipes.items(), log_probabilities, strict=True)
        ]

    def better_than(self, model: PreTrainedModel, bits: float) -> dict[str, Any] | None:
        """Return the best rival of at most ``bits`` bits per weight, as a dict of the fields of `Rival`.

        None if no such rival has a lower KL than ``model``, which is compressed.
        """
        prefix, modules = decoder_layers(model)
        layers = [DecoderLayer(f"{prefix}.{index}", module, {}) for index, module in enumerate(modules)]
        [log_probabilities] = self._log_probabilities(model, layers, [None])
        own = self._kl(log_probabilities)
        better = [rival for rival in self._rivals if rival.bits <= bits and rival.kl < own]
        return asdict(replace(min(better, key=lambda rival: rival.kl), own_kl=own)) if better else None

    @property
    def _tokens(self) -> int:
        return sum(ids.shape[1] - 1 for ids in self._sequences)

    def _kl(self, log_probabilities: Sequence[Tensor]) -> float:
        pairs = zip(log_probabilities, self._dense, strict=True)
        total = sum(F.kl_div(own, dense, log_target=True, reduction="sum").item() for own, dense in pairs)
        return total / max(1, self._tokens)

    @torch.no_grad()
    def _log_probabilities(
        self,
        model: PreTrainedModel,
        layers: Sequence[DecoderLayer],
        recipes: Sequence[Recipe | None],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[list[Tensor]]:
        """Run a model once per item of ``recipes``, with one decoder layer at a time on the device.

        For None the model runs as it is, for a recipe its linear layers are rounded to nearest.

        Yields:
            For each item a list with one tensor per sequence: the log-probabilities that predict its second and later
            tokens, [tokens - 1, vocabulary] float32.
        """
        training, modules = model.training, [layer.module for layer in layers]
        hidden: list[Tensor] = []
        calls = record_calls(model.eval(), modules, self._sequences, hidden.append)
        home, dtype, moved = hidden[0].device, hidden[0].dtype, list[tuple[Tensor, Tensor]]()
        states = [[state.to(self._device) for state in hidden] for _ in recipes]
        for index, layer in enumerate(layers):
            progress(index, len(layers))
            own_calls = [call.to(self._device, dtype, moved) for call in calls[index]]
            present = _copy(layer, self._device)
            for number, recipe in enumerate(recipes):
                module = _rounded_copy(present, layer.patterns, recipe) if recipe else present
                states[number] = [call(module, state) for call, state in zip(own_calls, states[number], strict=True)]
        for finals in states:
            pairs = zip(self._sequences, finals, strict=True)
            logits = [logits_after(model, modules, ids, final.to(home))[0, :-1].float() for ids, final in pairs]
            yield [each.log_softmax(-1) for each in logits]
        model.train(training)


def _dense_recipes() -> dict[str, Recipe]:
    """Return the built-in recipes that prune nothing and store low bits in groups, by name."""
    named = {name: read_recipe(name) for name, settings in recipes().items() if "quant" in settings}
    return {name: recipe for name, recipe in named.items() if _is_dense(parse_pattern(recipe.pattern))}


def _is_dense(pattern: Pattern) -> bool:
    return isinstance(pattern, Group) and pattern.percent == 0


def _bits(recipe: Recipe, weights: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Return the bits per weight that a recipe stores these weights in."""
    candidate = Candidate(recipe.format, recipe.pattern, {"kind": recipe.quant})
    shapes = [weight.shape for weight in weights]
    stored = sum(problem_for(candidate, 1, n, k, dtype, "cpu")[1] for n, k in shapes)
    return 8 * stored / sum(n * k for n, k in shapes)


def _rounded(weight: Tensor, bits: int, size: int) -> Tensor:
    """Return a weight [N, K] rounded to nearest in groups of ``size``, in its dtype."""
    scales = scales_of(weight, bits, size, weight.dtype)
    return fake_quantise(weight.float(), scales.scale.float(), scales.zero.float(), bits, size).to(weight.dtype)


def _copy(layer: DecoderLayer, device: torch.device) -> nn.Module:
    """Copy a decoder layer to a device. On a GPU packed layers become dense, unless they quantise activations."""
    if not sparse_layers(layer.module):
        return copy_to(layer.module, device)
    module = copy.deepcopy(layer.module)
    if device.type == "cuda":
        _unpack(module, device)
    return module.to(device)


def _rounded_copy(module: nn.Module, linears: Iterable[str], recipe: Recipe) -> nn.Module:
    """Return a decoder layer whose linear layers are rounded to nearest as a recipe says."""
    module, bits, size = copy.deepcopy(module), int(recipe.quant[1:]), parse_pattern(recipe.pattern).step
    for name in linears:
        weight = weight_of(module.get_submodule(name))
        weight.copy_(_rounded(weight, bits, size))
    return module


def _unpack(module: nn.Module, device: torch.device) -> None:
    """Make packed layers dense, to save compiling kernels for so few tokens. Layers that quantise x stay packed."""
    for name, layer in sparse_layers(module).items():
        codes = layer.read_codes()
        if codes is None or not codes.rounds_x:
            tensors = {key: tensor.to(device) for key, tensor in layer.packed.tensors.items()}
            with torch.device("meta"):
                dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            dense.weight = nn.Parameter(Packed(layer.packed.spec, tensors).unpack(), requires_grad=False)
            dense.register_parameter("bias", layer.bias)
            module.set_submodule(name, dense)


def _first_sequences(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return the first calibration sequences, [1, length] int64 each, at most ``tokens`` tokens in total."""
    sequences: list[Tensor] = []
    for sequence in (row for batch in batches for row in batch):
        left = tokens - sum(ids.shape[1] for ids in sequences)
        if left < 2:
            break
        sequences.append(sequence[None, :left])
    return sequences
