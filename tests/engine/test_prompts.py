"""Prompts in CUDA graphs: which are captured, and that they give what a launch from Python gives."""

import pytest
import torch

from semisparse.engine import Engine
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.engine.prompts import MAX_TOKENS, captured_length
from tests.models import byte_tokenizer, random_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs: there is no GPU")


@pytest.mark.parametrize(
    ("lengths", "positions", "expected"),
    [
        ([1], 256, 1),
        ([5], 256, 8),
        ([130], 256, 192),
        ([200], 200, None),  # padding would exceed the cache
        ([MAX_TOKENS], 1024, MAX_TOKENS),
        ([MAX_TOKENS + 1], 1024, None),
        ([100, 128, 3, 4], 256, 128),
        ([100, 129, 3, 4], 256, None),
    ],
)
def test_which_prompts_are_captured(lengths: list[int], positions: int, expected: int | None):
    assert captured_length(lengths, Cache(len(lengths), positions, [])) == expected


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_captured_logits_are_those_of_a_launch_from_python(dtype: torch.dtype):
    backend = Engine(random_model("llama", dtype, head_dim=8).to("cuda"), byte_tokenizer()).backend
    assert isinstance(backend, DecoderBackend)
    found = []
    for prompts in ([[7, 8, 9, 10, 11]], [[1, 2, 3]], [[4] * 9, [5] * 2, [6] * 12], [[7, 8, 9, 10, 11]], [[3] * 7]):
        state, logits = backend.begin(prompts, 40)
        cache = Cache.make(backend.decoder, len(prompts), 40)
        expected = backend.decoder.prompt(prompts, cache)
        torch.testing.assert_close(
            logits[: len(prompts)], expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
        )
        for row, prompt in enumerate(prompts):
            for own, other in zip(state.cache.layers, cache.layers, strict=True):
                kept = own.keys[row, :, : len(prompt)]
                torch.testing.assert_close(kept, other.keys[row, :, : len(prompt)], rtol=2e-2, atol=2e-2)
        found.append(logits)
    assert torch.equal(found[0], found[3])  # a later replay does not overwrite logits that were returned
    assert set(backend._prompts) <= {(1, 8), (1, 4), (3, 16)}
    assert backend._prompts


@needs_gpu
def test_a_long_prompt_after_a_short_one():
    engine = Engine(random_model("llama", torch.float32, head_dim=8).to("cuda"), byte_tokenizer())
    alone = [engine.generate([prompt], 12)[0].text for prompt in ("ab", "def f(x): return x + 1, 2, 3")]
    assert [engine.generate([prompt], 12)[0].text for prompt in ("def f(x): return x + 1, 2, 3", "ab")] == alone[::-1]
