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
    impl = attention.DecodeAttentionImpl.__new__(attention.DecodeAttentionImpl)
    impl.num_heads, impl.num_kv_heads, impl.head_size = HEADS, KV_HEADS, DIM
    impl._heads, impl._is_plain, impl.kv_sharing_target_layer_name = Heads(HEADS, KV_HEADS, DIM, DIM**-0.5), True, None

    def run(query: Tensor, new: Tensor, cache: Tensor, **changes: Any) -> Tensor:
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


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, new keys and values, and a cache. The third token is padding, which nothing writes."""
    query, new = torch.randn(3, HEADS, DIM).half(), torch.randn(3, 2, KV_HEADS, DIM).half()
    return query, new, torch.randn(8, 2, PAGE, KV_HEADS, DIM).half()


@needs_compiler
def test_two_sequences_attend_to_their_pages_and_write_to_them(attend):
    query, new, cache = tensors()
    before = cache.clone()
    found = attend(query, new, cache)
    before[0, :, 4], before[1, :, 4] = new[0], new[1]
    assert torch.equal(cache, before)
    for row, (pages, length) in enumerate((([3, 0], 21), ([1], 5))):
        keys, values = (cache[pages, i].flatten(0, 1)[:length].float().repeat_interleave(2, 1) for i in range(2))
        weights = torch.einsum("hd,phd->hp", query[row].float(), keys).mul(DIM**-0.5).softmax(-1)
        torch.testing.assert_close(
            found[row].float(), torch.einsum("hp,phd->hd", weights, values), rtol=2e-3, atol=2e-3
        )
    assert found[2].isnan().all()


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
