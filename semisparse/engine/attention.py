"""Attention with a static KV cache: rotary embedding, writing to the cache, attending to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.engine.attention_schedule import choose_schedule, grouping, workspace_of
from semisparse.engine.ops import FOLDER, SCALARS, Columns, rms_norm
from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import vector_of
from semisparse.runtime.kernel import Argument, CudaSource
from semisparse.runtime.nvrtc import Defines

ROPE = CudaSource(
    FOLDER / "rope.cu",
    (
        {"SCALAR": "__half", "DIM": 128, "VECTOR": 8, "LANES": 8},
        {"SCALAR": "__nv_bfloat16", "DIM": 8, "VECTOR": 1, "LANES": 4},
        {"SCALAR": "float", "DIM": 256, "VECTOR": 1, "LANES": 32},
    ),
)
ROPE_THREADS = 128
"""Threads per CTA of rope.cu."""


@dataclass(frozen=True)
class Heads:
    """Attention's shape: query heads, key-value heads, values per head; and the scale of scores."""

    count: int
    kv_count: int
    dim: int
    scale: float


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotary embedding, [length, head dim / 2] each, in the model's dtype."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True)
class LayerCache:
    """A decoder layer's keys and values, [sequences, key-value heads, length, head dim] each.

    Args:
        keys: keys.
        values: values.
        splits_by_length: whether the number of splits of the positions may depend on the length. The order of
            sums, and so the last bits, depend on that number.
    """

    keys: Tensor
    values: Tensor
    splits_by_length: bool = True


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each query and key head before they are rotated (Qwen3): weights [head dim]."""

    q: Tensor
    k: Tensor
    epsilon: float


def rotate_and_cache(
    qkv: Tensor,
    at: Columns,
    heads: Heads,
    table: RotaryTable,
    positions: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    Args:
        qkv: [M, at.width], a row per token: all tokens of a sequence, then those of the next, equally many of each.
        at: where queries, keys and values begin in a row.
        heads: their shape.
        table: cosines and sines of the rotary embedding.
        positions: [M] int32, each token's position in its sequence.
        cache: written at these positions.
        norms: norms of queries and keys, or None.
    Returns:
        The rotated queries, [M, heads, head dim].
    """
    sequences, _, length, _ = cache.keys.shape
    tokens = len(qkv) // sequences
    if device_facts(qkv.device).kind == "cuda":
        queries = qkv.new_empty(len(qkv), heads.count, heads.dim)
        weights = () if norms is None else (norms.q, norms.k)
        arrays = (qkv, table.cosines, table.sines, cache.keys, cache.values, *weights)
        vector = vector_of(qkv.dtype, [heads.dim // 2, at.width, *at.starts], arrays)
        lanes = min(32, 1 << (heads.dim // 2 // vector - 1).bit_length())
        defines: Defines = {"SCALAR": SCALARS[qkv.dtype], "DIM": heads.dim, "VECTOR": vector, "LANES": lanes}
        per_cta = ROPE_THREADS // lanes
        ROPE.build("semisparse_engine_rope", defines).load(qkv.device)(
            (len(qkv) * -(-(heads.count + 2 * heads.kv_count) // per_cta), 1, 1), ROPE_THREADS,
            pdl=device_facts(qkv.device).has_pdl,
            qkv=qkv, q_norm=None if norms is None else norms.q, k_norm=None if norms is None else norms.k,
            cosines=table.cosines, sines=table.sines, positions=positions, q_out=queries,
            keys=cache.keys, values=cache.values, heads=heads.count, kv_heads=heads.kv_count, tokens=tokens,
            length=length, stride=at.width, q_start=at.starts[0], k_start=at.starts[1], v_start=at.starts[2],
            epsilon=0.0 if norms is None else norms.epsilon,
        )  # fmt: skip
        return queries
    counts = (heads.count, heads.kv_count, heads.kv_count)
    q, k, v = (
        qkv.narrow(-1, start, count * heads.dim).unflatten(-1, (count, heads.dim))
        for start, count in zip(at.starts, counts, strict=True)
    )
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.epsilon)[1] for x, weight in ((q, norms.q), (k, norms.k)))
    cosine, sine = (part[positions.long()].repeat(1, 2)[:, None] for part in (table.cosines, table.sines))
    q, k = (x * cosine + _rotated_half(x) * sine for x in (q, k))
    sequence = torch.arange(sequences, device=qkv.device).repeat_interleave(tokens)
    cache.keys[sequence, :, positions.long()] = k
    cache.values[sequence, :, positions.long()] = v
    return q


def _rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_and_attend(
    qkv: Tensor,
    at: Columns,
    heads: Heads,
    table: RotaryTable,
    positions: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Call `rotate_and_cache`, then `attend_to_cache`.

    On a GPU one kernel replaces both calls, if there is one token per sequence, a head has a multiple of 16 values, and
    the parts of ``qkv`` are aligned to 16 bytes. The arguments are those of `rotate_and_cache`.

    Returns:
        [M, heads * head dim].
    """
    fusable = len(qkv) == len(cache.keys) and device_facts(qkv.device).kind == "cuda"
    if fusable and not (heads.dim % 16 or any(part % 8 for part in (at.width, *at.starts)) or qkv.data_ptr() % 16):
        out = qkv.new_empty(len(qkv), heads.count, heads.dim)
        _attend(
            out, cache, positions, heads, {"ROPE": 1, "PAGE": 0},
            q=qkv, q_norm=None if norms is None else norms.q, k_norm=None if norms is None else norms.k,
            cosines=table.cosines, sines=table.sines, stride=at.width, q_start=at.starts[0], k_start=at.starts[1],
            v_start=at.starts[2], epsilon=0.0 if norms is None else norms.epsilon,
        )  # fmt: skip
        return out.flatten(1)
    return attend_to_cache(rotate_and_cache(qkv, at, heads, table, positions, cache, norms), cache, positions, heads)


def attend_to_cache(q: Tensor, cache: LayerCache, positions: Tensor, heads: Heads) -> Tensor:
    """Attend from each token to the cached positions up to its own.

    Args:
        q: [M, heads, head dim]: all tokens of a sequence, then those of the next, equally many of each.
        cache: holds all positions up to those of the tokens.
        positions: [M] int32.
        heads: their shape.
    Returns:
        [M, heads * head dim].
    """
    sequences, _, length, _ = cache.keys.shape
    tokens = len(q) // sequences
    if device_facts(q.device).kind == "cuda":
        out = torch.empty_like(q)
        _attend(
            out, cache, positions, heads, {"ROPE": 0, "PAGE": 0},
            q=q, q_norm=None, k_norm=None, cosines=None, sines=None,
            stride=0, q_start=0, k_start=0, v_start=0, epsilon=0.0,
        )  # fmt: skip
        return out.flatten(1)
    visible = torch.arange(length, device=q.device) <= positions[:, None]
    q, visible = q.unflatten(0, (sequences, tokens)).transpose(1, 2), visible.unflatten(0, (sequences, 1, tokens))
    out = F.scaled_dot_product_attention(
        q, cache.keys, cache.values, visible, scale=heads.scale, enable_gqa=heads.count != heads.kv_count
    )
    return out.transpose(1, 2).flatten(0, 1).flatten(1)


def _attend(
    out: Tensor, cache: LayerCache, positions: Tensor, heads: Heads, rope: Defines, **arguments: Argument
) -> None:
    """Launch attention.cu with its arguments for q and the rotary embedding."""
    sequences, _, length, _ = cache.keys.shape
    facts, m = device_facts(out.device), len(out)
    group, ctas = grouping(heads.count, heads.kv_count)
    bounded = length if cache.splits_by_length else None
    schedule = choose_schedule(ctas * m, group, heads.dim, bounded, out.dtype.itemsize, facts.sms, facts.capability)
    splits = schedule.splits
    partials, counters = workspace_of(out.device, m * heads.count * splits * (heads.dim + 4), m * ctas)
    defines: Defines = {"SCALAR": SCALARS[out.dtype], "DIM": heads.dim, "GROUP": group, **rope, **schedule.defines}
    schedule.source.build("semisparse_engine_attention", defines).load(out.device)(
        (splits, ctas, m), 32 * schedule.warps, pdl=facts.has_pdl,
        keys=cache.keys, values=cache.values, positions=positions, out=out, partials=partials, counters=counters,
        heads=heads.count, kv_heads=heads.kv_count, tokens=m // sequences, length=length, splits=splits,
        scale=heads.scale, **arguments,
    )  # fmt: skip


def attend_to_prompt(q: Tensor, cache: LayerCache, length: int, heads: Heads) -> Tensor:
    """Attend from each token of prompts, which begin at position 0, to itself and those before it.

    Args:
        q: [sequences * length, heads, head dim].
        cache: holds positions 0 to ``length`` - 1. Padding after a shorter prompt does not change the tokens before it.
        length: tokens of the longest prompt.
        heads: their shape.
    Returns:
        [sequences * length, heads * head dim].
    """
    out = F.scaled_dot_product_attention(
        q.unflatten(0, (-1, length)).transpose(1, 2),
        cache.keys[:, :, :length],
        cache.values[:, :, :length],
        is_causal=True,
        scale=heads.scale,
        enable_gqa=heads.count != heads.kv_count,
    )
    return out.transpose(1, 2).flatten(0, 1).flatten(1)
