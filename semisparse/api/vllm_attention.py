"""An attention backend for vLLM's decode steps of few sequences: ``vllm serve DIR --attention-backend CUSTOM``.

It is vLLM's FlashAttention, but steps of at most `MAX_SEQUENCES` tokens, one per sequence, run the engine's attention
kernel (attention.cu): FlashAttention is two kernels there, which take 14.4 us per layer of llama2-7b after 512 tokens
(H200, results/h200/vllm-kernels.csv).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from semisparse.engine.attention import Heads, PagedKernel, Pages, paged_kernel

MAX_SEQUENCES = 2
"""Steps of more sequences are FlashAttention's, which divides their work better."""


class DecodeAttentionBackend(FlashAttentionBackend):
    """vLLM's `FlashAttentionBackend` with another implementation."""

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return DecodeAttentionImpl


class DecodeAttentionImpl(FlashAttentionImpl):
    """vLLM's `FlashAttentionImpl`, which computes all but decode steps of few sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads = Heads(self.num_heads, self.num_kv_heads, self.head_size, self.scale)
        self._is_plain = (
            self.alibi_slopes is None
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.sinks is None
            and self.attn_type == AttentionType.DECODER
            and self.dcp_world_size == 1
            and self.head_size % 8 == 0
            and self.head_size <= 256
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend as vLLM's method does; its arguments are the same."""
        if attn_metadata is None or not self._takes(attn_metadata, query, kv_cache, output):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        m, numbers = attn_metadata.num_actual_tokens, attn_metadata.block_table
        keys, values = kv_cache.unbind(1)
        page = keys.shape[1]
        longest = numbers.stride(0) * page
        kernel = _kernel(m, self._heads, page, longest, query.dtype, query.device)
        kernel(query[:m], Pages(keys, values, numbers, attn_metadata.seq_lens, longest), output[:m])
        return output

    def _takes(self, metadata: Any, query: Tensor, kv_cache: Tensor, output: Tensor) -> bool:
        """Return whether a step is of few sequences with a token each, and the tensors are laid out for the kernel."""
        return (
            self._is_plain
            and metadata.max_query_len == 1
            and metadata.num_actual_tokens <= min(MAX_SEQUENCES, len(metadata.seq_lens), len(metadata.block_table))
            and not metadata.use_cascade
            and metadata.causal is True
            and kv_cache.dtype == query.dtype
            and kv_cache.stride(-1) == 1
            and query.stride()[1:] == (self.head_size, 1)
            and query.stride(0) % 8 == 0
            and query.data_ptr() % 16 == 0
            and output.is_contiguous()
        )


@cache
def _kernel(m: int, heads: Heads, page: int, longest: int, dtype: torch.dtype, device: torch.device) -> PagedKernel:
    """Return `paged_kernel`, found once: the warm-up before a graph is captured loads it."""
    return paged_kernel(m, heads, page, longest, dtype, device)
