"""Prompts in CUDA graphs: which are captured, and that they give what a launch from Python gives."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from semisparse.engine import Engine, prompts
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache, Decoder
from semisparse.engine.prompts import GRAIN, MAX_GRAPHS, MAX_TOKENS, SHORT_TOKENS, Prompts, captured_length
from semisparse.engine.sampling import Sampling
from tests.models import byte_tokenizer, random_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs: there is no GPU")

SHORT, LONG = 12, 40
"""`SHORT_TOKENS` and `MAX_TOKENS` of these tests, with a `GRAIN` of 4."""


@pytest.mark.parametrize(
    ("lengths", "positions", "expected"),
    [
        ([1], 256, 1),
        ([5], 256, 8),
        ([130], 256, 192),
        ([200], 200, None),  # padding would exceed the cache
        ([SHORT_TOKENS], 1024, SHORT_TOKENS),
        ([SHORT_TOKENS + 1], 1024, SHORT_TOKENS + GRAIN),
        ([1000], 1000, None),
        ([1000], 1024, 1024),
        ([1024], 1024, 1024),
        ([1025], 2048, 1024 + GRAIN),
        ([MAX_TOKENS], 4096, MAX_TOKENS),
        ([MAX_TOKENS + 1], 4096, None),
        ([100, 128, 3, 4], 256, 128),
        ([100, 129, 3, 4], 256, 160),
        ([7] * 100, 256, 7),  # 800 tokens as 8 each are 1,600 with a bucket of 16, or 700
        ([21] * 100, 256, None),
    ],
)
def test_which_prompts_are_captured(lengths: list[int], positions: int, expected: int | None):
    assert captured_length(lengths, Cache(len(lengths), positions, [])) == expected


def test_padding_stays_in_the_bucket_of_kernels():
    """So a length that comes first after the kernels of its bucket were compiled compiles nothing."""
    for length in range(SHORT_TOKENS + 1, MAX_TOKENS + 1):
        padded = captured_length([length], Cache(1, 4096, []))
        assert padded is not None
        assert prompts.bucket_of(padded) == prompts.bucket_of(length)


class Recorded:
    """Stands for `CapturedPrompts` on a CPU: runs what it would capture, and counts its calls."""

    def __init__(self, decoder: Decoder, cache: Cache, length: int, logits: Tensor, pool: object) -> None:
        assert pool == "a pool"
        assert logits.shape == (cache.sequences, logits.shape[1])
        self.decoder, self.cache, self.length, self.calls = decoder, cache, length, 0

    def __call__(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self.calls += 1
        return self.decoder.prompt(tokens, self.cache, self.length)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DecoderBackend:
    """A backend on a CPU that captures as on a GPU."""
    monkeypatch.setattr(prompts, "CapturedPrompts", Recorded)
    monkeypatch.setattr(prompts, "SHORT_TOKENS", SHORT)
    monkeypatch.setattr("semisparse.engine.backend.SHORT_TOKENS", SHORT)
    monkeypatch.setattr(prompts, "MAX_TOKENS", LONG)
    monkeypatch.setattr(prompts, "GRAIN", 4)
    monkeypatch.setattr(prompts, "free_memory", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    found = Engine(random_model("llama", torch.float32, head_dim=8), byte_tokenizer()).backend
    assert isinstance(found, DecoderBackend)
    found.prompts = Prompts(found.decoder, captures=True)
    return found


@torch.no_grad()
def test_a_long_prompt_is_captured_at_its_second_use(backend: DecoderBackend):
    first = backend.begin([[7] * 18], 60)[1]
    graphs = backend.prompts._graphs
    assert not graphs  # launched from Python
    second = backend.begin([[7] * 18], 60)[1]
    assert graphs[1, 20].calls == 1
    backend.begin([[9] * 17], 60)  # padded alike
    assert graphs[1, 20].calls == 2
    backend.begin([[9] * 9], 60)
    assert graphs[1, 12].calls == 1  # a short prompt is captured at once
    backend.begin([[9] * 41], 60)
    backend.begin([[9] * 41], 60)
    assert set(graphs) == {(1, 20), (1, 12)}  # 41 are more than may be captured
    assert torch.equal(first, second)


@torch.no_grad()
def test_padding_changes_no_logits(backend: DecoderBackend):
    tokens = [[5 + i for i in range(18)], [3] * 7]
    padded = backend.begin(tokens, 60)[1]
    assert backend.prompts.length([18, 7], backend._state.cache) == 18
    longer = backend.decoder.prompt(tokens, Cache.make(backend.decoder, 2, 60), 23)
    torch.testing.assert_close(padded, longer, rtol=1e-4, atol=1e-4)


def test_warming_up_captures(backend: DecoderBackend):
    """`Engine` compiles a batch, runs it to warm up, and then in earnest."""
    backend.compile([[7] * 18], 2, 0)
    for _ in backend.run([[7] * 18], 2, Sampling()):
        pass
    assert backend.prompts._graphs[1, 20].calls == 1


def test_another_long_prompt_needs_no_warming_up(backend: DecoderBackend):
    def needs(length: int) -> object:
        return backend.needs([[7] * length], 20, Sampling(), 0)

    assert needs(13) == needs(16)
    assert needs(33) != needs(16)  # kernels of another bucket
    assert needs(5) != needs(3)  # captured at its first use, which warming up is
    assert needs(5) == needs(7)


@torch.no_grad()
def test_another_cache_needs_other_graphs(backend: DecoderBackend):
    for positions in (60, 300):
        for _ in range(2):
            backend.begin([[7] * 18], positions)
        assert set(backend.prompts._graphs) == {(1, 20)}
        assert backend.prompts._graphs[1, 20].cache.length == backend._state.cache.length


@torch.no_grad()
def test_the_graph_used_longest_ago_is_dropped(backend: DecoderBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_GRAPHS", 2)
    for length in (1, 2, 1, 3):
        backend.begin([[7] * length], 60)
    assert list(backend.prompts._graphs) == [(1, 1), (1, 4)]
    assert MAX_GRAPHS > 2


@torch.no_grad()
def test_nothing_is_captured_where_memory_lacks(backend: DecoderBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "free_memory", lambda device: 100)
    found = [backend.begin([[7] * 18], 60)[1] for _ in range(3)]
    assert not backend.prompts._graphs
    assert torch.equal(found[0], found[2])


def test_bytes_of_a_graph_are_those_of_a_layers_activations():
    decoder = SimpleNamespace(
        dtype=torch.bfloat16,
        structure=SimpleNamespace(
            norm=torch.zeros(4096), layers=[SimpleNamespace(gate=torch.nn.Linear(1, 11008, device="meta"))]
        ),
    )
    made = Prompts(decoder, captures=True)  # type: ignore[arg-type]
    assert made._bytes(2048) == 2048 * (4096 + 11008) * 4 * 2


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_captured_logits_are_those_of_a_launch_from_python(dtype: torch.dtype):
    backend = Engine(random_model("llama", dtype, head_dim=8).to("cuda"), byte_tokenizer()).backend
    assert isinstance(backend, DecoderBackend)
    found = []
    for tokens in ([[7, 8, 9, 10, 11]], [[1, 2, 3]], [[4] * 9, [5] * 2, [6] * 12], [[7, 8, 9, 10, 11]], [[3] * 7]):
        state, logits = backend.begin(tokens, 40)
        cache = Cache.make(backend.decoder, len(tokens), 40)
        expected = backend.decoder.prompt(tokens, cache)
        torch.testing.assert_close(
            logits[: len(tokens)], expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
        )
        for row, prompt in enumerate(tokens):
            for own, other in zip(state.cache.layers, cache.layers, strict=True):
                kept = own.keys[row, :, : len(prompt)]
                torch.testing.assert_close(kept, other.keys[row, :, : len(prompt)], rtol=2e-2, atol=2e-2)
        found.append(logits)
    assert torch.equal(found[0], found[3])  # a later replay does not overwrite logits that were returned
    assert set(backend.prompts._graphs) <= {(1, 8), (1, 4), (3, 16)}
    assert backend.prompts._graphs


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[600], [1100], [2048], [300, 290, 301], [90] * 8])
@torch.no_grad()
def test_a_long_prompt_gives_the_same_bits_at_each_use(dtype: torch.dtype, lengths: list[int]):
    """Launched from Python at its first use, captured at its second, and replayed."""
    model = random_model("llama", dtype, head_dim=8, max_position_embeddings=4096).to("cuda")
    backend = Engine(model, byte_tokenizer()).backend
    assert isinstance(backend, DecoderBackend)
    tokens = [[(7 * i + row) % 90 for i in range(length)] for row, length in enumerate(lengths)]
    found, keys = [], []
    for _ in range(4):
        state, logits = backend.begin(tokens, 2300)
        found.append(logits[: len(tokens)])
        keys.append(
            [layer.keys[row, :, :length].clone() for layer in state.cache.layers for row, length in enumerate(lengths)]
        )
        backend.begin([[5] * (1500 // len(tokens))] * len(tokens), 2300)  # another graph with the same memory
    assert len(backend.prompts._graphs) == 2
    unpadded = backend.decoder.prompt(tokens, Cache.make(backend.decoder, len(tokens), 2300))
    torch.testing.assert_close(found[0], unpadded, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4)
    for logits, kept in zip(found[1:], keys[1:], strict=True):
        assert torch.equal(logits, found[0])
        assert all(map(torch.equal, kept, keys[0]))


@needs_gpu
def test_a_long_prompt_after_a_short_one():
    engine = Engine(random_model("llama", torch.float32, head_dim=8).to("cuda"), byte_tokenizer())
    alone = [engine.generate([prompt], 12)[0].text for prompt in ("ab", "def f(x): return x + 1, 2, 3")]
    assert [engine.generate([prompt], 12)[0].text for prompt in ("def f(x): return x + 1, 2, 3", "ab")] == alone[::-1]


@needs_gpu
def test_texts_after_captured_prompts_are_those_of_prompts_launched_from_python():
    model = random_model("llama", torch.float32, head_dim=8, max_position_embeddings=4096).to("cuda")
    engine = Engine(model, byte_tokenizer())
    texts = ["def f(x): return x + 1, " * 30, "ab" * 500, "a b c " * 250]
    captured = [engine.generate([text], 24)[0].text for text in texts for _ in range(3)]
    assert isinstance(engine.backend, DecoderBackend)
    assert engine.backend.prompts._graphs
    engine.backend.prompts.captures = False
    assert captured == [engine.generate([text], 24)[0].text for text in texts for _ in range(3)]
