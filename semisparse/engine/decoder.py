"""A Llama-like decoder with a static cache: few kernels per layer, none of which waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from semisparse.engine.ops import (
    Columns,
    LayerCache,
    RotaryTable,
    attend_to_cache,
    attend_to_prompt,
    kernels_refusal,
    rms_norm,
    rotate_and_cache,
    silu_mul,
)
from semisparse.engine.structure import Layer, Structure, UnknownStructureError, recognise, rotary_table
from semisparse.formats import Packed, linear
from semisparse.formats.base import WeightSpec
from semisparse.formats.product import prepare_products
from semisparse.nn import JoinedLinear, SparseLinear


class DenseLinear:
    """Dense linear layers on one input as one layer of the format ``dense``; their weights become views of its weight.

    Args:
        layers: with biases or without.

    Attributes:
        packed: the layers' weight.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        weights = [layer.get_parameter("weight") for layer in layers]
        rows = [len(weight) for weight in weights]
        whole = weights[0].data if len(layers) == 1 else torch.cat([weight.data for weight in weights])
        spec = {"format": "dense", "version": 1, "pattern": "0%", "shape": list(whole.shape), "params": {}}
        dtype = str(whole.dtype).removeprefix("torch.")
        self.packed = Packed(WeightSpec.from_dict({**spec, "dtype": dtype}), {"values": whole})
        self._bias: Tensor | None = None
        if any(getattr(layer, "bias", None) is not None for layer in layers):
            biases = [getattr(layer, "bias", None) for layer in layers]
            filled = [w.new_zeros(len(w)) if b is None else b.data for w, b in zip(weights, biases, strict=True)]
            self._bias = torch.cat(filled)
        if len(layers) > 1:
            for weight, part in zip(weights, whole.split(rows), strict=True):
                weight.data = part

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self._bias)


class Projection:
    """Linear layers on one input as one matmul: joined by `nn.join_layers`, or dense layers concatenated here.

    Args:
        layers: in the order of the output's columns.
        parent: the module that holds them.
    """

    def __init__(self, layers: Sequence[nn.Module], parent: nn.Module) -> None:
        joined = [module for module in parent.children() if isinstance(module, JoinedLinear)]
        widths = [rows_of(layer) for layer in layers]
        starts = tuple(sum(widths[:i]) for i in range(len(widths)))
        self.columns = Columns(starts, sum(widths))
        self._parts: list[DenseLinear | nn.Module]
        if joined and len(joined[0].extents) == len(layers):
            self._parts = [joined[0]]
            self.columns = Columns(tuple(start for start, _ in joined[0].extents), joined[0].out_features)
        elif all(type(layer) is nn.Linear for layer in layers):
            self._parts = [DenseLinear(layers)]
        else:
            self._parts = [DenseLinear([layer]) if type(layer) is nn.Linear else layer for layer in layers]

    @property
    def weights(self) -> list[Packed]:
        """The packed weights."""
        return [part.packed for part in self._parts if isinstance(part, DenseLinear | SparseLinear)]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: [M, K] to [M, columns.width]."""
        outputs = [part(x) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def rows_of(layer: nn.Module) -> int:
    """Return the output features of a linear layer."""
    count = layer.out_features
    assert isinstance(count, int)
    return count


@dataclass(frozen=True)
class FusedLayer:
    """A decoder layer with its joined projections."""

    layer: Layer
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All four."""
        return self.qkv, self.o, self.gate_up, self.down


class Cache:
    """Keys and values of all layers, for so many sequences of so many positions.

    Args:
        structure: of the decoder.
        sequences: at once.
        length: positions of each.
        device: where.
        dtype: of the model.
    """

    def __init__(
        self, structure: Structure, sequences: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.sequences, self.length = sequences, length
        shape = (sequences, structure.heads.kv_count, length, structure.heads.dim)
        self.layers = [
            LayerCache(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for _ in structure.layers
        ]

    @staticmethod
    def bytes_of(structure: Structure, sequences: int, length: int, dtype: torch.dtype) -> int:
        """Return the bytes that such a cache takes."""
        heads = structure.heads
        return 2 * len(structure.layers) * sequences * heads.kv_count * length * heads.dim * dtype.itemsize


class Decoder:
    """A model's forward pass as the engine runs it.

    Args:
        model: on its device.
        length: positions to make the rotary table for.
    Raises:
        UnknownStructureError: the model is no Llama-like decoder, or the engine's kernels cannot run it.
    """

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        self.structure = recognise(model)
        weight = self.structure.norm
        self.device, self.dtype = weight.device, weight.dtype
        if self.device.type == "cuda":
            reason = kernels_refusal(self.device, self.dtype, self.structure.heads.dim)
            if reason is not None:
                raise UnknownStructureError(reason)
        self.layers = [
            FusedLayer(
                layer,
                Projection((layer.q, layer.k, layer.v), layer.parents[0]),
                Projection((layer.o,), layer.parents[0]),
                Projection((layer.gate, layer.up), layer.parents[1]),
                Projection((layer.down,), layer.parents[1]),
            )
            for layer in self.structure.layers
        ]
        self.table: RotaryTable = rotary_table(self.structure, length, self.device, self.dtype)
        self._rotary_length = length
        head = self.structure.head
        self._head: DenseLinear | nn.Module = DenseLinear([head]) if type(head) is nn.Linear else head

    def compile(self, steps: Iterable[int], prompts: Iterable[int]) -> None:
        """Compile and load the GPU kernels of products, in parallel.

        Args:
            steps: tokens per decode step, which the head's product takes, too.
            prompts: tokens of all prompts together.
        """
        if self.device.type != "cuda":
            return
        layers = [weight for layer in self.layers for part in layer.projections for weight in part.weights]
        head = [self._head.packed] if isinstance(self._head, DenseLinear | SparseLinear) else []
        prepare_products(layers, {*steps, *prompts}, self.dtype)
        prepare_products(head, steps, self.dtype)

    def ensure_length(self, length: int) -> None:
        """Make the rotary table long enough."""
        if length > self._rotary_length:
            self.table, self._rotary_length = rotary_table(self.structure, length, self.device, self.dtype), length

    def prompt(self, tokens: Tensor, last: Tensor, cache: Cache) -> Tensor:
        """Take prompts from their first token on.

        Args:
            tokens: [sequences, T] int64; shorter prompts end in anything.
            last: [sequences] int64, the place of each prompt's last token.
            cache: of as many sequences.
        Returns:
            [sequences, vocabulary], the logits after each prompt.
        """
        sequences, length = tokens.shape
        positions = torch.arange(length, device=self.device, dtype=torch.int32).repeat(sequences)
        hidden = self._layers(
            tokens,
            positions,
            cache,
            lambda q, layer: attend_to_prompt(q, layer, length, self.structure.heads),
        )
        rows = torch.arange(sequences, device=self.device) * length + last
        return self.logits(hidden[rows])

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Take further tokens of each sequence.

        Args:
            tokens: [sequences, T] int64.
            positions: [sequences * T] int32, their places.
            cache: of as many sequences.
        Returns:
            [sequences * T, vocabulary], the logits after each token.
        """
        heads = self.structure.heads
        hidden = self._layers(tokens, positions, cache, lambda q, layer: attend_to_cache(q, layer, positions, heads))
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits, [M, vocabulary], of normalised hidden states [M, C]."""
        return self._head(hidden)

    def _layers(
        self, tokens: Tensor, positions: Tensor, cache: Cache, attend: Callable[[Tensor, LayerCache], Tensor]
    ) -> Tensor:
        """Return the hidden states after the last norm, [M, C]."""
        structure = self.structure
        epsilon, heads = structure.epsilon, structure.heads
        residual = structure.embedding(tokens.flatten())
        delta: Tensor | None = None
        for fused, cached in zip(self.layers, cache.layers, strict=True):
            layer = fused.layer
            residual, hidden = rms_norm(residual, layer.input_norm, epsilon, delta)
            queries = rotate_and_cache(
                fused.qkv(hidden), fused.qkv.columns, heads, self.table, positions, cached, layer.head_norms
            )
            delta = fused.o(attend(queries, cached))
            residual, hidden = rms_norm(residual, layer.mlp_norm, epsilon, delta)
            gate_up = fused.gate_up(hidden)
            delta = fused.down(silu_mul(gate_up, fused.gate_up.columns, rows_of(layer.gate)))
        return rms_norm(residual, structure.norm, epsilon, delta)[1]


CHECKED_TOKENS = 8
"""Tokens on which the engine is compared with the model's own code."""


@torch.no_grad()
def check_against(model: PreTrainedModel, decoder: Decoder) -> None:
    """Compare the decoder with the model's own code on a few tokens.

    Raises:
        UnknownStructureError: the logits differ by more than rounding explains.
    """
    vocabulary = int(decoder.structure.embedding.get_parameter("weight").shape[0])
    tokens = (torch.arange(CHECKED_TOKENS, device=decoder.device) * 7 + 1).remainder(vocabulary)[None]
    own = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
    cache = Cache(decoder.structure, 1, 16, decoder.device, decoder.dtype)
    found = decoder.prompt(tokens, torch.tensor([CHECKED_TOKENS - 1], device=decoder.device), cache)[0].float()
    off = F.cosine_similarity(own, found, dim=0)
    limit = 0.9999 if decoder.dtype == torch.float32 else 0.99
    if not off > limit:
        raise UnknownStructureError(f"its logits are others than the engine's (cosine similarity {off:.4f})")
