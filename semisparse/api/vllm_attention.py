"""An attention backend for vLLM's decode steps of few sequences, which `integrations/vllm/attention.py` chooses.

It is vLLM's FlashAttention, but steps of at most `MAX_SEQUENCES` tokens, one per sequence, run the engine's attention
kernel (attention.cu). It replaces three: FlashAttention is two kernels there, which take 14.4 us per layer of llama2-7b
after 512 tokens, and vLLM writes keys and values to the cache by another one, in 2.4 us (H200,
results/h200/vllm-kernels.csv).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from semisparse.engine.attention import Heads
from semisparse.engine.paged_attention import PagedKernel, Pages, paged_kernel

MAX_SEQUENCES = 2
"""Steps of more sequences are FlashAttention's, which divides their work better."""


class DecodeAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """vLLM's `FlashAttentionMetadataBuilder`: a graph of decode steps serves no others.

    vLLM captures the graphs of all steps (``cudagraph_mode`` ``FULL``) with one token per sequence. The graph of two
    tokens would contain the engine's kernel, and a step of two tokens of one sequence may be no step of two sequences.
    So vLLM takes ``FULL_AND_PIECEWISE``, its default, instead.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class DecodeAttentionBackend(FlashAttentionBackend):
    """vLLM's `FlashAttentionBackend` with another implementation."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return DecodeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return DecodeAttentionMetadataBuilder


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
            and self.kv_sharing_target_layer_name is None
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
        """Attend as vLLM's method does, and write keys and values to the cache; the arguments are the same."""
        if attn_metadata is not None and self._takes(attn_metadata, query, key, value, kv_cache, output):
            m, numbers = attn_metadata.num_actual_tokens, attn_metadata.block_table
            keys, values = kv_cache.unbind(1)
            page = keys.shape[1]
            kernel = _kernel(m, self._heads, page, numbers.stride(0) * page, query.dtype, query.device)
            pages = Pages(keys, values, numbers, attn_metadata.seq_lens, attn_metadata.slot_mapping)
            kernel(query[:m], key[:m], value[:m], pages, output[:m])
            return output
        if attn_metadata is not None and key is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    def _takes(
        self, metadata: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, output: Tensor
    ) -> bool:
        """Return whether a step is of few sequences with a token each, and the tensors are laid out for the kernel."""
        tokens = metadata.num_actual_tokens
        return (
            self._is_plain
            and metadata.max_query_len == 1
            and tokens <= min(MAX_SEQUENCES, len(metadata.seq_lens), len(metadata.block_table))
            and tokens <= len(metadata.slot_mapping)
            and not metadata.use_cascade
            and metadata.causal is True
            and kv_cache.dtype == query.dtype
            and kv_cache.stride(-1) == 1
            and all(self._is_aligned(tensor) for tensor in (query, key, value))
            and output.is_contiguous()
        )

    def _is_aligned(self, heads: Tensor | None) -> bool:
        """Return whether the kernel can read a token's heads: contiguous, and every row begins at 16 bytes."""
        return (
            heads is not None
            and heads.stride()[1:] == (self.head_size, 1)
            and heads.stride(0) % 8 == 0
            and heads.data_ptr() % 16 == 0
        )


@cache
def _kernel(m: int, heads: Heads, page: int, longest: int, dtype: torch.dtype, device: torch.device) -> PagedKernel:
    """Return `paged_kernel`, found once: the warm-up before a graph is captured loads it."""
    return paged_kernel(m, heads, page, longest, dtype, device)
