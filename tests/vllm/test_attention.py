"""The attention backend of decode steps, its kernel emulated, on the cache and the metadata that vLLM passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda_emulator import emulate, needs_compiler

pytest.importorskip("vllm", reason="vLLM is not installed")

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the backend's forward; vLLM's own, which it may call, returns None."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from semisparse.api import vllm_attention as attention
    from semisparse.engine.attention import Heads

    emulate(monkeypatch)
    attention._kernel.cache_clear()
    written = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *arguments: written.pop())
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", lambda *arguments: written.append(arguments[-1]))

    def run(query: Tensor, new: Tensor, cache: Tensor, **changes: Any) -> Tensor:
        _, heads, dim = query.shape
        impl = attention.DecodeAttentionImpl.__new__(attention.DecodeAttentionImpl)
        impl.num_heads, impl.num_kv_heads, impl.head_size = heads, new.shape[2], dim
        impl._heads, impl._is_plain = Heads(heads, new.shape[2], dim, dim**-0.5), True
        impl.kv_sharing_target_layer_name = None
        metadata = {
            "num_actual_tokens": 2,
            "max_query_len": 1,
            "seq_lens": torch.tensor([21, 5], dtype=torch.int32),
            "block_table": torch.tensor([[3, 0, 7], [1, 7, 7]], dtype=torch.int32),
            "slot_mapping": torch.tensor([4, 20]),
            "use_cascade": False,
            "causal": True,
        }
        out = torch.full_like(query, float("nan"))
        return impl.forward(None, query, *new.unbind(1), cache, SimpleNamespace(**{**metadata, **changes}), out)

    yield run
    attention._kernel.cache_clear()


def tensors(heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, new keys and values, and a cache. The third token is padding, which nothing writes."""
    query, new = torch.randn(3, heads, dim).half(), torch.randn(3, 2, kv_heads, dim).half()
    return query, new, torch.randn(8, 2, PAGE, kv_heads, dim).half()


def exact(query: Tensor, cache: Tensor, pages: list[int], length: int) -> Tensor:
    """One token's attention [heads, dim] in float32 to the positions in pages."""
    heads, dim = query.shape
    repeats = heads // cache.shape[3]
    keys, values = (cache[pages, i].flatten(0, 1)[:length].float().repeat_interleave(repeats, 1) for i in range(2))
    weights = torch.einsum("hd,phd->hp", query.float(), keys).mul(dim**-0.5).softmax(-1)
    return torch.einsum("hp,phd->hd", weights, values)


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (14, 2, 64), (12, 1, 80), (3, 3, 128), (4, 1, 256)])
def test_two_sequences_attend_to_their_pages_and_write_to_them(attend, heads: int, kv_heads: int, dim: int):
    query, new, cache = tensors(heads, kv_heads, dim)
    before = cache.clone()
    found = attend(query, new, cache)
    before[0, :, 4], before[1, :, 4] = new[0], new[1]
    assert torch.equal(cache, before)
    for row, (pages, length) in enumerate((([3, 0], 21), ([1], 5))):
        expected = exact(query[row], cache, pages, length)
        torch.testing.assert_close(found[row].float(), expected, rtol=2e-3, atol=2e-3)
    assert found[2].isnan().all()


@needs_compiler
def test_a_sequence_that_pads_a_graph_changes_nothing(attend):
    """The graph of two sequences computes one: the other has no positions, and no place in the cache."""
    query, new, cache = tensors()
    before = cache.clone()
    lengths, slots = torch.tensor([21, 0], dtype=torch.int32), torch.tensor([4, -1])
    found = attend(query, new, cache, seq_lens=lengths, slot_mapping=slots)
    before[0, :, 4] = new[0]
    assert torch.equal(cache, before)
    torch.testing.assert_close(found[0].float(), exact(query[0], cache, [3, 0], 21), rtol=2e-3, atol=2e-3)
    assert not found[1].any()


def test_graphs_of_decode_steps_serve_no_other_steps():
    """vLLM captures the graphs of `FULL` with a token per sequence, and takes that mode if the backend allows it."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from semisparse.api.vllm_attention import DecodeAttentionBackend

    support = DecodeAttentionBackend.get_builder_cls().get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    "changes",
    [{"max_query_len": 2}, {"num_actual_tokens": 3}, {"use_cascade": True}, {"causal": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_steps_are_left_to_flash_attention_and_vllm_s_writing(attend, changes):
    query, new, cache = tensors()
    assert attend(query, new, cache, **changes).tolist() == [4, 20]


def test_tensors_that_the_kernel_does_not_take_are_left_to_vllm(attend):
    query, new, cache = tensors()
    for arguments in (
        (query, new, cache.to(torch.float8_e4m3fn)),
        (query.repeat(1, 2, 1)[:, ::2], new, cache),
        (query, new.repeat(1, 1, 2, 1)[:, :, ::2], cache),
    ):
        assert attend(*arguments).tolist() == [4, 20]
