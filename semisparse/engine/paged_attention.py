"""Attention with a KV cache in pages, as serving engines keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.engine.attention import Heads
from semisparse.engine.attention_schedule import Schedule, choose_schedule, grouping, workspace_of
from semisparse.engine.ops import SCALARS
from semisparse.runtime.device import device_facts
from semisparse.runtime.nvrtc import Defines


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
    facts = device_facts(device)
    group, ctas = grouping(heads.count, heads.kv_count)
    schedule = choose_schedule(ctas * m, group, heads.dim, longest, dtype.itemsize, facts.sms, facts.capability)
    defines: Defines = {"SCALAR": SCALARS[dtype], "DIM": heads.dim, "GROUP": group, "ROPE": 0, "PAGE": page}
    kernel = schedule.source.build("semisparse_engine_paged_attention", {**defines, **schedule.defines}).load(device)
    workspace = workspace_of(device, m * heads.count * schedule.splits * (heads.dim + 4), m * ctas)
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
