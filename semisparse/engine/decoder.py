"""A Llama-like decoder with a static KV cache: few kernels per layer, no host-device synchronisation between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisparse.engine.attention import LayerCache, RotaryTable, attend_to_prompt, rotate_and_attend, rotate_and_cache
from semisparse.engine.bare import BareDecoder
from semisparse.engine.ops import kernels_refusal
from semisparse.engine.projection import Norm, Projection, Stream, rows_of
from semisparse.engine.structure import Layer, Structure, UnknownStructureError, recognise, rotary_table
from semisparse.errors import CheckpointError, InputError
from semisparse.formats.kernel import in_parallel
from semisparse.nn.dense_linear import DenseCopy
from semisparse.nn.fused_linear import ADDED, GATED, NORMED, is_aligned

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FusedLayer:
    """A decoder layer's norms (before attention and before the MLP) and its projections, joined where possible."""

    layer: Layer
    norms: tuple[Norm, Norm]
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The layer's four projections."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def modules_of_projections(self) -> tuple[tuple[Projection, tuple[nn.Module, ...]], ...]:
        """Each projection, and the modules that it computes."""
        layer = self.layer
        modules = (layer.q, layer.k, layer.v), (layer.o,), (layer.gate, layer.up), (layer.down,)
        return tuple(zip(self.projections, modules, strict=True))


@dataclass(frozen=True)
class Cache:
    """The KV cache of all layers, of ``sequences`` sequences of ``length`` positions each."""

    sequences: int
    length: int
    layers: list[LayerCache]

    @staticmethod
    def make(decoder: Decoder, sequences: int, length: int) -> Cache:
        """Allocate a cache on the decoder's device, in its dtype."""
        heads, device, dtype = decoder.structure.heads, decoder.device, decoder.dtype
        shape = (sequences, heads.kv_count, length, heads.dim)
        layers = [
            LayerCache(
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
                splits_by_length=decoder.group is None,
            )
            for _ in decoder.structure.layers
        ]
        return Cache(sequences, length, layers)

    def part(self, first: int, count: int) -> Cache:
        """Return the cache of ``count`` sequences from ``first`` on, which shares this one's memory."""
        if count == self.sequences:
            return self
        parts = [
            replace(layer, keys=layer.keys[first : first + count], values=layer.values[first : first + count])
            for layer in self.layers
        ]
        return Cache(count, self.length, parts)

    @staticmethod
    def bytes_of(structure: Structure, sequences: int, length: int, dtype: torch.dtype) -> int:
        """Return the bytes that such a cache takes."""
        heads = structure.heads
        return 2 * len(structure.layers) * sequences * heads.kv_count * length * heads.dim * dtype.itemsize


class Decoder:
    """A model's forward pass as the engine runs it.

    Args:
        model: on its device: transformers' model, or its weights alone.
        length: positions of the rotary table.
        group: sequences per pass of `step`; None for all at once. With a group each prompt is run alone, and a
            sequence's logits are the same bits in any batch.
    Raises:
        UnknownStructureError: the model is no Llama-like decoder, or the engine's kernels cannot run it.
    """

    def __init__(self, model: PreTrainedModel | BareDecoder, length: int, group: int | None = None) -> None:
        self.group = group
        self.structure = model.structure if isinstance(model, BareDecoder) else recognise(model)
        weight = self.structure.norm
        self.device, self.dtype = weight.device, weight.dtype
        if self.device.type == "cuda":
            reason = kernels_refusal(self.device, self.dtype, self.structure.heads.dim)
            if reason is not None:
                raise UnknownStructureError(reason)
        self.layers = [
            FusedLayer(
                layer,
                (self._norm(layer.input_norm), self._norm(layer.mlp_norm)),
                Projection((layer.q, layer.k, layer.v), layer.parents[0], NORMED),
                Projection((layer.o,), layer.parents[0], ADDED),
                Projection((layer.gate, layer.up), layer.parents[1], GATED),
                Projection((layer.down,), layer.parents[1], ADDED),
            )
            for layer in self.structure.layers
        ]
        self.table, self._rotary_length = self._rotary_table(length), length
        self._last_norm = self._norm(self.structure.norm)
        self._head = Projection((self.structure.head,), model, NORMED)

    def _norm(self, weight: Tensor) -> Norm:
        """Return a Norm with a 16-byte-aligned weight, for vectorised loads; an unaligned weight is cloned."""
        return Norm(weight if is_aligned(weight) else weight.detach().clone(), self.structure.epsilon)

    def keep_dense(self, model: nn.Module, patterns: Sequence[str]) -> int:
        """Keep dense copies of packed layers, for the M at which they are faster; return the bytes of the copies.

        Args:
            model: the model that this decoder runs.
            patterns: glob patterns of the layers' module names. Layers on one input are copied together, if all match.
        Raises:
            InputError: no packed layer matches, or the copies do not fit the GPU's memory.
        """
        projections = self._matching(model, patterns)
        copied = [layer for projection in projections for layer in projection.copyable.values()]
        needed = sum(DenseCopy.bytes_of(layer, self.dtype) for layer in copied)
        free = free_memory(self.device) if self.device.type == "cuda" else needed
        if needed > free:
            raise InputError(
                f"dense copies of {len(copied)} layers take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of GPU memory "
                "are free: name fewer layers in keep_dense"
            )
        for projection in projections:
            projection.keep_dense(self.dtype)
        return needed

    def _matching(self, model: nn.Module, patterns: Sequence[str]) -> list[Projection]:
        """Return the projections all of whose modules match a pattern.

        Raises:
            InputError: a pattern, or all of them together, match no packed layer.
        """
        names = {id(module): name for name, module in model.named_modules()}
        own = [
            names[id(module)]
            for layer in self.layers
            for part, modules in layer.modules_of_projections
            if part.copyable
            for module in modules
        ]
        if not own:
            raise InputError("keep_dense copies packed layers, and this model has none: leave it out")
        unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in own)]
        if unmatched:
            raise InputError(
                f"keep_dense is {', '.join(unmatched)}, which matches no packed layer; an example of a name is "
                f"{names[id(self.layers[0].layer.down)]}"
            )
        matching = [
            projection
            for layer in self.layers
            for projection, modules in layer.modules_of_projections
            if all(any(fnmatchcase(names[id(module)], pattern) for pattern in patterns) for module in modules)
        ]
        if not any(projection.copyable for projection in matching):
            raise InputError(
                f"keep_dense is {', '.join(patterns)}, which matches some of the layers on one input only: name all of "
                "q_proj, k_proj and v_proj, or gate_proj and up_proj"
            )
        return matching

    def compile(self, sequences: int, widths: Iterable[int], prompts: Sequence[int]) -> None:
        """Compile and load the GPU kernels of all matmuls, in parallel.

        Args:
            sequences: number of sequences per decode step.
            widths: numbers of tokens per sequence and step.
            prompts: number of tokens of each prompt.
        """
        if self.device.type != "cuda":
            return
        steps = {(self.group or sequences) * width for width in widths}
        heads = steps | {1 if self.group else len(prompts)}
        layers = steps | (set(prompts) if self.group else {len(prompts) * max(prompts)})
        # Layers of one structure share their kernels. Threads that look for the same one would each compile it.
        parts = {part.structure: part for layer in self.layers for part in layer.projections}.values()
        jobs = [(part, m) for part in parts for m in layers]
        in_parallel(partial(part.prepare, m, self.dtype) for part, m in (*jobs, *((self._head, m) for m in heads)))

    def ensure_length(self, length: int) -> None:
        """Make the rotary table long enough."""
        if length > self._rotary_length:
            self.table, self._rotary_length = self._rotary_table(length), length

    def _rotary_table(self, length: int) -> RotaryTable:
        structure = self.structure
        return rotary_table(structure.rotary, structure.heads.dim, length, self.device, self.dtype)

    def prompt(self, prompts: Sequence[Sequence[int]], cache: Cache, length: int | None = None) -> Tensor:
        """Run prompts, which begin at position 0.

        Args:
            prompts: token ids of each prompt.
            cache: KV cache of as many sequences.
            length: what prompts are padded to, by default the longest one's length; without a group only.
        Returns:
            [prompts, vocabulary], the logits after each prompt.
        """
        if self.group is None:
            return self._prompt(prompts, cache, length or max(map(len, prompts)))
        return torch.cat([self._prompt([prompt], cache.part(i, 1), len(prompt)) for i, prompt in enumerate(prompts)])

    def _prompt(self, prompts: Sequence[Sequence[int]], cache: Cache, length: int) -> Tensor:
        """Run prompts at once, padded at the end."""
        tokens = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        return self.padded_prompt(tokens, last, cache)

    def padded_prompt(self, tokens: Tensor, last: Tensor, cache: Cache) -> Tensor:
        """Run prompts that are on the device. The host is not waited for, so that a CUDA graph can capture it.

        Args:
            tokens: [prompts, length] int64, shorter prompts padded at the end.
            last: [prompts] int64, the position of each prompt's last token.
            cache: KV cache of as many sequences.
        Returns:
            [prompts, vocabulary], the logits after each prompt.
        """
        count, length = tokens.shape
        positions = torch.arange(length, device=self.device, dtype=torch.int32).repeat(count)
        heads = self.structure.heads

        def attend(qkv: Tensor, fused: FusedLayer, cached: LayerCache) -> Tensor:
            at, norms = fused.qkv.columns, fused.layer.head_norms
            queries = rotate_and_cache(qkv, at, heads, self.table, positions, cached, norms)
            return attend_to_prompt(queries, cached, length, heads)

        stream = self._layers(tokens, cache, attend)
        rows = torch.arange(count, device=self.device) * length + last
        return self._logits(Stream(stream.x[rows], None if stream.delta is None else stream.delta[rows]))

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Run further tokens of each sequence.

        Args:
            tokens: [sequences, T] int64; the number of sequences is a multiple of the group, if there is one.
            positions: [sequences * T] int32, their positions.
            cache: KV cache of as many sequences.
        Returns:
            [sequences * T, vocabulary], the logits after each token.
        """
        group, width = self.group or cache.sequences, tokens.shape[1]
        logits = [
            self._step(tokens[i : i + group], positions[i * width : (i + group) * width], cache.part(i, group))
            for i in range(0, cache.sequences, group)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Run further tokens of each sequence at once."""
        heads = self.structure.heads

        def attend(qkv: Tensor, fused: FusedLayer, cached: LayerCache) -> Tensor:
            at, norms = fused.qkv.columns, fused.layer.head_norms
            return rotate_and_attend(qkv, at, heads, self.table, positions, cached, norms)

        return self._logits(self._layers(tokens, cache, attend))

    def _logits(self, stream: Stream) -> Tensor:
        """Return the head's logits, [M, vocabulary]."""
        return self._head.normed(stream, self._last_norm)[1]

    def _layers(
        self, tokens: Tensor, cache: Cache, attend: Callable[[Tensor, FusedLayer, LayerCache], Tensor]
    ) -> Stream:
        """Return the residual stream after the last layer."""
        stream = Stream(self.structure.embedding(tokens.flatten()))
        for fused, cached in zip(self.layers, cache.layers, strict=True):
            stream, qkv = fused.qkv.normed(stream, fused.norms[0])
            stream = fused.o.added(attend(qkv, fused, cached), stream)
            width = rows_of(fused.layer.gate)
            stream, gated = fused.gate_up.normed_and_gated(stream, fused.norms[1], width, fused.down)
            stream = fused.down.added(gated, stream)
        return stream


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that tensors can still take, memory that torch has reserved included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


CHECKED_TOKENS = 8
"""Tokens on which the engine is compared with the model's own code."""


@torch.no_grad()
def check_against(model: PreTrainedModel | BareDecoder, decoder: Decoder) -> None:
    """Compare the decoder with the model's own code on a few tokens.

    A bare decoder has no code of its own. An earlier start has compared it (`blueprint`), with the same weights or
    others: here only NaN is refused.

    Raises:
        UnknownStructureError: the logits differ by more than rounding explains.
        CheckpointError: the model's own logits are NaN.
    """
    vocabulary = int(decoder.structure.embedding.get_parameter("weight").shape[0])
    tokens = [(7 * i + 1) % vocabulary for i in range(CHECKED_TOKENS)]
    engines = decoder.prompt([tokens], Cache.make(decoder, 1, 16))[0].float()
    own = engines
    if not isinstance(model, BareDecoder):
        own = model(input_ids=torch.tensor([tokens], device=decoder.device), use_cache=False).logits[0, -1].float()
    if own.isnan().any():
        raise CheckpointError(
            f"the model's own logits are NaN in {decoder.dtype}: a weight is NaN or infinite, or an activation too "
            "large for this dtype; take an undamaged copy of the model, or give Engine another dtype"
        )
    if isinstance(model, BareDecoder):
        return
    similarity = F.cosine_similarity(own, engines, dim=0)
    limit = 0.9999 if decoder.dtype == torch.float32 else 0.99
    if not similarity > limit:
        raise UnknownStructureError(f"its logits differ from the engine's (cosine similarity {similarity:.4f})")
