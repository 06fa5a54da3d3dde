"""What a decoder layer computes between its linear layers: own kernels on a GPU, torch elsewhere.

Both round where transformers rounds: each result to the model's dtype, and the factors of products before they are
multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

FOLDER = Path(__file__).parent / "cuda"

_VECTORS: tuple[Defines, ...] = (
    {"SCALAR": "__half", "VECTOR": 8},
    {"SCALAR": "__nv_bfloat16", "VECTOR": 1},
    {"SCALAR": "float", "VECTOR": 4},
)

RMS_NORM = CudaSource(FOLDER / "rms_norm.cu", _VECTORS)
SILU_MUL = CudaSource(FOLDER / "silu_mul.cu", _VECTORS)
GREEDY = CudaSource(FOLDER / "greedy.cu", _VECTORS)
ROPE = CudaSource(
    FOLDER / "rope.cu",
    ({"SCALAR": "__half", "DIM": 128}, {"SCALAR": "__nv_bfloat16", "DIM": 8}, {"SCALAR": "float", "DIM": 64}),
)
ATTENTION = CudaSource(
    FOLDER / "attention.cu",
    (
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1},
        {"SCALAR": "__half", "DIM": 256, "GROUP": 4},
        {"SCALAR": "__half", "DIM": 8, "GROUP": 8},
    ),
)

MAX_GROUP = 8
"""Query heads that a CTA of the attention kernel computes; more of one key-value head take several CTAs."""

HEADS_PER_CTA = 4
"""Of the rotary embedding's kernel, a warp each."""

MIN_SPLIT = 64
"""Positions that a split of attention has at least."""


def kernels_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why the engine's kernels cannot run on a device, or None if they can."""
    if dtype not in SCALARS:
        return f"the model is {dtype}; the kernels take float16, bfloat16 and float32"
    if head_dim % 8 or head_dim > 256:
        return f"heads have {head_dim} values; the kernels take multiples of 8 up to 256"
    return cuda_refusal(device)


@dataclass(frozen=True)
class Heads:
    """Attention's shape: query heads, key-value heads, values per head, and what scores are multiplied by."""

    count: int
    kv_count: int
    dim: int
    scale: float


@dataclass(frozen=True)
class Columns:
    """Where parts of a joined linear layer's output begin, and how many columns it has."""

    starts: tuple[int, ...]
    width: int


def _vector(dtype: torch.dtype, counts: Sequence[int], tensors: Sequence[Tensor | None]) -> int:
    """Return how many values a thread loads at once: 16 bytes, or one value where a count or an address forbids it."""
    values = 16 // dtype.itemsize
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return values if aligned and not any(count % values for count in counts) else 1


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise.

    Args:
        x: [M, C], the residual stream.
        weight: [C].
        epsilon: added to the mean of squares.
        delta: [M, C], added to x first, or None.
    Returns:
        The residual stream with delta added, and the normalised rows, both [M, C] in x's dtype.
    """
    if device_facts(x.device).kind == "cuda":
        rows, columns = x.shape
        out = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        vector = _vector(x.dtype, [columns], [x, weight, delta])
        threads = min(1024, -(-columns // vector // 32) * 32)
        defines: Defines = {"SCALAR": SCALARS[x.dtype], "VECTOR": vector}
        kernel = RMS_NORM.build("semisparse_engine_rms_norm", defines, 2 * columns * x.dtype.itemsize).load(x.device)
        kernel(
            (rows, 1, 1), threads, pdl=device_facts(x.device).has_pdl,
            x=x, delta=delta, weight=weight, sum=total, out=out, columns=columns, epsilon=epsilon,
        )  # fmt: skip
        return total, out
    total = x if delta is None else x + delta
    wide = total.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return total, weight * normalised.to(x.dtype)


def silu_mul(gate_up: Tensor, at: Columns, columns: int) -> Tensor:
    """Return ``silu(gate) * up``, [M, columns], of the columns of a joined output [M, at.width]."""
    if device_facts(gate_up.device).kind == "cuda":
        out = gate_up.new_empty(len(gate_up), columns)
        vector = _vector(out.dtype, [columns, at.width, *at.starts], [gate_up])
        defines: Defines = {"SCALAR": SCALARS[out.dtype], "VECTOR": vector}
        SILU_MUL.build("semisparse_engine_silu_mul", defines).load(out.device)(
            (-(-columns // (256 * vector)), len(out), 1), 256, pdl=device_facts(out.device).has_pdl,
            gate_up=gate_up, out=out, columns=columns, stride=at.width, gate_start=at.starts[0], up_start=at.starts[1],
        )  # fmt: skip
        return out
    gate, up = (gate_up.narrow(-1, start, columns) for start in at.starts)
    return F.silu(gate) * up


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotary embedding, [length, head dim / 2] each, in the model's dtype."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True)
class LayerCache:
    """A decoder layer's keys and values, [sequences, key-value heads, length, head dim] each."""

    keys: Tensor
    values: Tensor


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
        qkv: [M, at.width], tokens of all sequences, as many of each, one sequence after the other.
        at: where queries, keys and values begin in a row.
        heads: their shape.
        table: of the rotary embedding.
        positions: [M] int32, each token's place in its sequence.
        cache: written at these places.
        norms: of queries and keys, or None.
    Returns:
        The rotated queries, [M, heads, head dim].
    """
    sequences, _, length, _ = cache.keys.shape
    tokens = len(qkv) // sequences
    if device_facts(qkv.device).kind == "cuda":
        queries = qkv.new_empty(len(qkv), heads.count, heads.dim)
        build = ROPE.build("semisparse_engine_rope", {"SCALAR": SCALARS[qkv.dtype], "DIM": heads.dim})
        count = heads.count + 2 * heads.kv_count
        build.load(qkv.device)(
            (-(-count // HEADS_PER_CTA), len(qkv), 1), 32 * HEADS_PER_CTA, pdl=device_facts(qkv.device).has_pdl,
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


def attend_to_cache(q: Tensor, cache: LayerCache, positions: Tensor, heads: Heads) -> Tensor:
    """Attend from each token to the cached positions up to its own.

    Args:
        q: [M, heads, head dim], tokens of all sequences, as many of each, one sequence after the other.
        cache: holds every position up to the tokens'.
        positions: [M] int32.
        heads: their shape.
    Returns:
        [M, heads * head dim].
    """
    sequences, _, length, _ = cache.keys.shape
    tokens = len(q) // sequences
    if device_facts(q.device).kind == "cuda":
        out = torch.empty_like(q)
        per_kv = heads.count // heads.kv_count
        group = min(per_kv, MAX_GROUP)
        ctas = heads.kv_count * -(-per_kv // group)
        splits = _splits(ctas * len(q), length, device_facts(q.device).sms)
        workspace = _workspace(q.device, len(q) * heads.count * splits * (heads.dim + 4), len(q) * ctas)
        defines: Defines = {"SCALAR": SCALARS[q.dtype], "DIM": heads.dim, "GROUP": group}
        ATTENTION.build("semisparse_engine_attention", defines).load(q.device)(
            (ctas, splits, len(q)), 128, pdl=device_facts(q.device).has_pdl,
            q=q, keys=cache.keys, values=cache.values, positions=positions, out=out,
            partials=workspace[0], counters=workspace[1], heads=heads.count, kv_heads=heads.kv_count,
            tokens=tokens, length=length, splits=splits, scale=heads.scale,
        )  # fmt: skip
        return out.flatten(1)
    visible = torch.arange(length, device=q.device) <= positions[:, None]
    q, visible = q.unflatten(0, (sequences, tokens)).transpose(1, 2), visible.unflatten(0, (sequences, 1, tokens))
    out = F.scaled_dot_product_attention(
        q, cache.keys, cache.values, visible, scale=heads.scale, enable_gqa=heads.count != heads.kv_count
    )
    return out.transpose(1, 2).flatten(0, 1).flatten(1)


def attend_to_prompt(q: Tensor, cache: LayerCache, length: int, heads: Heads) -> Tensor:
    """Attend from each token of prompts, which begin at position 0, to those before it.

    Args:
        q: [sequences * length, heads, head dim].
        cache: holds the prompts' positions 0 to ``length`` - 1. What stands past a shorter prompt's end changes no
            token before it.
        length: of the longest prompt.
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


@cache
def _splits(ctas: int, length: int, sms: int) -> int:
    """Return into how many parts the positions are cut: so many that every SM has two CTAs."""
    return max(1, min(-(-2 * sms // ctas), length // MIN_SPLIT, 64))


@cache
def _workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial results, and counters, which every launch leaves at 0.

    It is shared by all layers: launches on one stream follow one another.
    """
    return torch.empty(floats, device=device), torch.zeros(counters, dtype=torch.int32, device=device)


def greedy_step(logits: Tensor, tokens: Tensor, positions: Tensor, output: Tensor, steps: Tensor) -> None:
    """Take each sequence's most probable token, and move the decode step's state on.

    Args:
        logits: [sequences, vocabulary].
        tokens: [sequences] int64: becomes these tokens.
        positions: [sequences] int32: each grows by 1.
        output: [capacity, sequences] int64: gets the tokens at row ``steps[0]``.
        steps: [2] int32: how many rows of the output are written, which grows by 1; then a 0.
    """
    if device_facts(logits.device).kind == "cuda":
        vector = _vector(logits.dtype, [logits.shape[1]], [logits])
        defines: Defines = {"SCALAR": SCALARS[logits.dtype], "VECTOR": vector}
        GREEDY.build("semisparse_engine_greedy", defines).load(logits.device)(
            (len(tokens), 1, 1), 1024, pdl=device_facts(logits.device).has_pdl,
            logits=logits, tokens=tokens, positions=positions, output=output, steps=steps,
            vocabulary=logits.shape[1], capacity=len(output),
        )  # fmt: skip
        return
    move_on(logits.argmax(-1), tokens, positions, output, steps)


def move_on(chosen: Tensor, tokens: Tensor, positions: Tensor, output: Tensor, steps: Tensor) -> None:
    """Move the decode step's state on with chosen tokens, as `greedy_step` does; without waiting for the device."""
    tokens.copy_(chosen)
    positions += 1
    output.index_copy_(0, steps[:1].clamp(max=len(output) - 1).long(), chosen[None])
    steps[0] += 1
