"""Attention with a static KV cache: rotary embedding, writing to the cache, attending to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.engine.ops import FOLDER, SCALARS, Columns, rms_norm
from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import vector_of
from semisparse.runtime.kernel import HOPPER, Argument, CudaSource
from semisparse.runtime.nvrtc import Defines

ROPE = CudaSource(
    FOLDER / "rope.cu",
    (
        {"SCALAR": "__half", "DIM": 128, "VECTOR": 8, "LANES": 8},
        {"SCALAR": "__nv_bfloat16", "DIM": 8, "VECTOR": 1, "LANES": 4},
        {"SCALAR": "float", "DIM": 256, "VECTOR": 1, "LANES": 32},
    ),
)
_FEW: Defines = {"WARPS": 4, "AHEAD": 2, "CTAS": 2, "CLUSTER": 1, "PAGE": 0}
ATTENTION = CudaSource(
    FOLDER / "attention.cu",
    (
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 8, "CTAS": 3},
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "WARPS": 8, "AHEAD": 5},
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 5, "CTAS": 4},
        {"SCALAR": "__half", "DIM": 128, "GROUP": 8, "ROPE": 1, **_FEW},
        {"SCALAR": "float", "DIM": 64, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 4, "CTAS": 3},
        {"SCALAR": "__half", "DIM": 256, "GROUP": 4, "ROPE": 0, **_FEW, "CTAS": 3},
        {"SCALAR": "__half", "DIM": 8, "GROUP": 8, "ROPE": 0, **_FEW},
        {"SCALAR": "__half", "DIM": 64, "GROUP": 6, "ROPE": 0, **_FEW, "PAGE": 16},
    ),
)
CLUSTERED_ATTENTION = CudaSource(
    FOLDER / "attention.cu",
    (
        {"SCALAR": "__nv_bfloat16", "DIM": 128, "GROUP": 1, "ROPE": 1, **_FEW, "AHEAD": 10, "CTAS": 3, "CLUSTER": 8},
        {"SCALAR": "__half", "DIM": 64, "GROUP": 4, "ROPE": 1, **_FEW, "CTAS": 3, "CLUSTER": 5},
        {"SCALAR": "float", "DIM": 256, "GROUP": 2, "ROPE": 0, **_FEW, "AHEAD": 4, "CTAS": 3, "CLUSTER": 2},
        {
            "SCALAR": "__nv_bfloat16",
            "DIM": 128,
            "GROUP": 1,
            "ROPE": 0,
            **_FEW,
            "AHEAD": 10,
            "CTAS": 3,
            "CLUSTER": 8,
            "PAGE": 16,
        },
    ),
    architectures=("sm_90a", "sm_100a"),
)

MAX_GROUP = 8
"""Maximum query heads per CTA of attention.cu. A key-value head with more takes several CTAs."""

ROPE_THREADS = 128
"""Threads per CTA of rope.cu."""

WARPS = 4
"""Warps per CTA of attention.cu, but for one wave of CTAs with unsplit positions and one query head each."""

MIN_SPLIT = 64
"""Minimum positions per split of attention.cu."""

RESIDENT_CTAS = 3
"""CTAs of attention.cu per SM, by its registers (up to 4 query heads per CTA; else 2)."""

MAX_CLUSTER = 8
"""Maximum CTAs of a cluster that every GPU with clusters has."""

SHARED_BYTES = 47 << 10
"""Shared memory that partial results of a CTA may take: a kernel has 48 KB without asking for more."""

MAX_SPLITS = 64
"""Maximum splits of the positions."""


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
    per_kv = heads.count // heads.kv_count
    group = min(per_kv, MAX_GROUP)
    ctas = heads.kv_count * -(-per_kv // group)
    bounded = length if cache.splits_by_length else None
    schedule = _schedule(ctas * m, group, heads.dim, bounded, out.dtype.itemsize, facts.sms, facts.capability)
    splits = schedule.splits
    partials, counters = _workspace(out.device, m * heads.count * splits * (heads.dim + 4), m * ctas)
    defines: Defines = {"SCALAR": SCALARS[out.dtype], "DIM": heads.dim, "GROUP": group, **rope, **schedule.defines}
    source = CLUSTERED_ATTENTION if schedule.clustered else ATTENTION
    source.build("semisparse_engine_attention", defines).load(out.device)(
        (splits, ctas, m), 32 * schedule.warps, pdl=facts.has_pdl,
        keys=cache.keys, values=cache.values, positions=positions, out=out, partials=partials, counters=counters,
        heads=heads.count, kv_heads=heads.kv_count, tokens=m // sequences, length=length, splits=splits,
        scale=heads.scale, **arguments,
    )  # fmt: skip


@dataclass(frozen=True)
class Pages:
    """A KV cache in pages, as serving engines keep it.

    Args:
        keys: [pages, positions, key-value heads, head dim], contiguous along the last.
        values: the same, with the same strides.
        numbers: [M, maximum pages] int32, the pages of each sequence.
        lengths: [M] int32, its positions, the current token included.
        slots: [M] int64, the current token's position among those of all pages; negative: it is not written.
    """

    keys: Tensor
    values: Tensor
    numbers: Tensor
    lengths: Tensor
    slots: Tensor


def paged_kernel(
    m: int, heads: Heads, page: int, longest: int, dtype: torch.dtype, device: torch.device
) -> PagedKernel:
    """Return what attends from ``m`` tokens, the last of their sequences, to pages of ``page`` positions.

    Args:
        m: tokens.
        heads: their shape.
        page: positions of a page.
        longest: the most positions that a sequence may have.
        dtype: of queries and cache.
        device: a GPU.
    """
    facts, per_kv = device_facts(device), heads.count // heads.kv_count
    group = min(per_kv, MAX_GROUP)
    ctas = heads.kv_count * -(-per_kv // group)
    schedule = _schedule(ctas * m, group, heads.dim, longest, dtype.itemsize, facts.sms, facts.capability)
    defines: Defines = {"SCALAR": SCALARS[dtype], "DIM": heads.dim, "GROUP": group, "ROPE": 0, "PAGE": page}
    source = CLUSTERED_ATTENTION if schedule.clustered else ATTENTION
    kernel = source.build("semisparse_engine_paged_attention", {**defines, **schedule.defines}).load(device)
    workspace = _workspace(device, m * heads.count * schedule.splits * (heads.dim + 4), m * ctas)
    return PagedKernel(kernel, schedule, heads, ctas, *workspace)


@dataclass(frozen=True)
class PagedKernel:
    """attention.cu for a KV cache in pages, as `paged_kernel` returns it."""

    launch: Callable[..., None]
    schedule: Schedule
    heads: Heads
    ctas: int
    partials: Tensor
    counters: Tensor

    def __call__(self, q: Tensor, key: Tensor, value: Tensor, pages: Pages, out: Tensor) -> None:
        """Attend from the last token of each sequence to all of its positions, and write its key and value.

        Args:
            q: [M, heads, head dim], rows contiguous and aligned to 16 bytes, as those of key and value.
            key: [M, key-value heads, head dim], of the tokens.
            value: the same.
            pages: hold all other positions; written.
            out: [M, heads, head dim] contiguous, written.
        """
        page_stride, position_stride, head_stride, _ = pages.keys.stride()
        self.launch(
            (self.schedule.splits, self.ctas, len(out)), 32 * self.schedule.warps,
            q=q, new_keys=key, new_values=value, keys=pages.keys, values=pages.values, lengths=pages.lengths,
            pages=pages.numbers, slots=pages.slots, out=out, partials=self.partials, counters=self.counters,
            heads=self.heads.count, kv_heads=self.heads.kv_count, page_numbers=pages.numbers.stride(0),
            splits=self.schedule.splits, stride=q.stride(0), key_stride=key.stride(0), value_stride=value.stride(0),
            page_stride=page_stride, position_stride=position_stride, head_stride=head_stride, scale=self.heads.scale,
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


@dataclass(frozen=True)
class Schedule:
    """How attention.cu divides the positions of a token.

    Args:
        splits: ranges of positions, a CTA each.
        warps: warps per CTA.
        ahead: positions per team of lanes whose loads are in flight.
        ctas: CTAs per SM that registers leave room for.
        clustered: whether the splits are a cluster.
    """

    splits: int
    warps: int
    ahead: int
    ctas: int
    clustered: bool = False

    @property
    def defines(self) -> Defines:
        """The macros of attention.cu that depend on the schedule."""
        cluster = self.splits if self.clustered else 1
        return {"WARPS": self.warps, "AHEAD": self.ahead, "CTAS": self.ctas, "CLUSTER": cluster}


@cache
def _schedule(
    ctas: int, group: int, dim: int, length: int | None, value_bytes: int, sms: int, capability: tuple[int, int]
) -> Schedule:
    """Return the schedule: enough splits for two CTAs per SM, but not more CTAs than are resident.

    Microseconds of attention in a layer of llama2-7b at position 560 (H200, results/h200/sweeps/attention.csv,
    decode-fused.csv). One sequence: splits in a cluster 5.6, exchanging through global memory 7.9; 8 positions per team
    in flight, a few less than a split has, instead of 9 cost 0.5 to 1.2 us more. Eight sequences: unsplit 18.8 with 8
    warps and 20.4 with 4; in two splits with global memory, where a quarter of the CTAs waits for an SM, 26.2.

    CTAs of 8 warps that take more than one wave leave SMs idle at their begin and end. With 4 warps, at position 160, a
    step of 8 layers takes 998 us instead of 1,038 for 32 sequences, 1,274 and 1,366 for 64, 1,777 and 1,889 for 128,
    but 671 and 660 for 8, whose 256 CTAs fit at once (results/h200/sweeps/attention-many.csv).

    Args:
        ctas: key-value heads times tokens times groups of query heads.
        group: query heads per CTA.
        dim: values of a head.
        length: of the cache; None if the number of splits must not depend on it.
        value_bytes: bytes of a value of the cache.
        sms: the GPU's SMs.
        capability: the GPU's compute capability.
    """
    resident = RESIDENT_CTAS * sms // ctas
    most = MAX_SPLITS if length is None else max(1, length // MIN_SPLIT)
    splits = max(1, min(-(-2 * sms // ctas), resident, most, MAX_SPLITS))
    clustered = 1 < splits <= MAX_CLUSTER + 1 and group <= MAX_GROUP // 2 and capability >= HOPPER
    if clustered:  # every CTA has room for the partial results of its warps, and of all splits
        splits = min(splits, MAX_CLUSTER, SHARED_BYTES // (4 * group * (dim + 4)) - WARPS)
    if group == 1 and value_bytes == 2 and splits == 1:
        return Schedule(splits, WARPS, ahead=5, ctas=4) if ctas > 2 * sms else Schedule(splits, 8, ahead=5, ctas=2)
    alone = 4 if value_bytes == 4 else 10 if clustered else 8  # with a query head per CTA; more would spill
    ahead = {1: alone, 2: 4}.get(group, 2)
    return Schedule(splits, WARPS, ahead, 2 if group > 4 else RESIDENT_CTAS, clustered)


@cache
def _workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial results, and counters, which every launch leaves at 0.

    All layers share it: kernels on one stream run one after another.
    """
    return torch.empty(floats, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
