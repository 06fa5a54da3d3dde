"""Dense copies of packed layers: which layers get one, and when it computes."""

from pathlib import Path

import pytest
import torch

from semisparse.api import compress
from semisparse.cli.generate import _patterns
from semisparse.engine import Engine, decoder
from semisparse.engine.decoder import Cache
from semisparse.errors import InputError
from semisparse.formats.product import _measured_speedup, measured_speedup
from semisparse.formats.tuned import _rows_of, measured_times, user_table
from semisparse.nn import dense_copy
from semisparse.runtime.device import device_facts
from tests.models import byte_tokenizer, random_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SETTINGS = ["prune=magnitude", "search=none"]
HEADER = "format,pattern,variant,dtype,n,k,m,kernel,us,dense_us\n"


def compressed(device: str = "cpu", name: str = "llama-bias") -> torch.nn.Module:
    model = random_model(name, torch.float32, head_dim=8)
    compress(model, byte_tokenizer(), recipe="rheosparse", settings=SETTINGS, device="cpu")
    return model.to(device)


def engine_of(model: torch.nn.Module, *patterns: str) -> Engine:
    return Engine(model, byte_tokenizer(), keep_dense=patterns)


def logits(engine: Engine, tokens: int) -> torch.Tensor:
    found = engine.backend.decoder
    with torch.no_grad():
        return found.prompt([[5 + i for i in range(tokens)]], Cache.make(found, 1, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_compute_long_prompts_with_the_same_result(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {0: 4})
    model = compressed(device)
    plain, kept = engine_of(model), engine_of(model, "*")
    for tokens in (3, 4, 9):
        torch.testing.assert_close(logits(kept, tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)
    prompts = ["def f(x):", "a"]
    assert [one.text for one in kept.generate(prompts, 8)] == [one.text for one in plain.generate(prompts, 8)]


@pytest.mark.parametrize("device", DEVICES)
def test_only_layers_that_match_are_copied_and_only_many_tokens_use_the_copy(
    device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {0: 4})
    model = compressed(device)
    plain, kept = engine_of(model), engine_of(model, "model.layers.1.mlp.down_proj", "*.gate_proj")
    assert kept.dense_bytes == 24 * 44 * 4  # gate is computed with up, which does not match
    assert plain.dense_bytes == 0
    (copy,) = kept.backend.decoder.layers[1].down._copies.values()
    assert not kept.backend.decoder.layers[0].down._copies
    copy._packed.tensors["values"].zero_()
    torch.testing.assert_close(logits(kept, 3), logits(plain, 3))
    assert not torch.allclose(logits(kept, 4), logits(plain, 4), rtol=1e-2)


def test_the_tuned_table_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    kept = engine_of(compressed(), "*.down_proj")
    down = kept.backend.decoder.layers[0].down
    ((index, layer),) = down.copyable.items()
    assert measured_speedup(layer.packed, 2, torch.float32) is None
    assert down._copy_for(index, dense_copy.MANY_TOKENS[0] - 1) is None
    assert down._copy_for(index, dense_copy.MANY_TOKENS[0]) is not None
    table = user_table(device_facts(torch.device("cpu")).name)
    table.parent.mkdir()
    times = {1: (10, 20), 8: (10, 5), 16: (10, 5), 512: (10, 20)}
    base = f"bitmask,{layer.packed.pattern},,float32,24,44"
    table.write_text(HEADER + "".join(f"{base},{m},{'cpu'},{us},{other}\n" for m, (us, other) in times.items()))
    caches = (_rows_of, measured_times, _measured_speedup)
    for cached in caches:
        cached.cache_clear()
    try:
        assert measured_speedup(layer.packed, 8, torch.float32) == 0.5
        assert [down._copy_for(index, m) is not None for m in (1, 8, 16, 512)] == [False, True, True, False]
        plain, name = engine_of(kept.model), "model.layers.0.mlp.down_proj"
        assert [name in plain.slower_than_dense(m) for m in (1, 8, 512)] == [False, True, False]
        assert not any(copied.endswith(".down_proj") for copied in kept.slower_than_dense(8))
    finally:
        for cached in caches:
            cached.cache_clear()


def test_what_cannot_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = compressed()
    with pytest.raises(
        InputError, match=r"matches no packed layer; an example of a name is model\.layers\.0\.mlp\.down_proj"
    ):
        engine_of(model, "down")
    with pytest.raises(InputError, match=r"keep_dense is \*\.typo, which matches no packed layer"):
        engine_of(model, "*.down_proj", "*.typo")
    with pytest.raises(InputError, match="matches some of the layers on one input only"):
        engine_of(model, "*.q_proj")
    with pytest.raises(InputError, match="--keep-dense names no layer"):
        _patterns(",")
    with pytest.raises(InputError, match="copies packed layers, and this model has none"):
        engine_of(random_model("llama", torch.float32), "*")
    with pytest.raises(InputError, match="expected a list of patterns"):
        Engine(model, byte_tokenizer(), keep_dense="*")
    with pytest.raises(InputError, match="keep_dense needs the engine's own code"):
        engine_of(random_model("gpt2", torch.float32), "*")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's memory: there is no GPU")
def test_copies_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"dense copies of 8 layers take .* GB, .* name fewer layers"):
        engine_of(compressed("cuda"), "*")
