"""Models that run through transformers' own code generate its text, or are refused if a step would forget the text."""

import warnings

import pytest
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from semisparse.engine import Engine
from semisparse.engine.transformers_backend import TransformersBackend
from semisparse.errors import CheckpointError, InputError
from tests.architectures import tiny_model
from tests.models import VOCABULARY, byte_tokenizer

PROMPTS = ("def f(x):", "a", "The quick brown fox")


def engine_of(name: str, **changes) -> Engine:
    if name == "OpenAI GPT":
        config = OpenAIGPTConfig(vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4)
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = tiny_model(name, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(model, byte_tokenizer())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BLOOM", {}),
        ("Falcon", {"alibi": True}),
        ("LFM2", {}),
        ("Gemma-3 text", {}),
        ("DeepSeek-V3", {}),
        ("MiniMax", {}),  # has a cache of its own class
    ],
)
def test_greedy_text_is_that_of_transformers(name: str, changes: dict[str, bool]):
    engine, tokenizer = engine_of(name, **changes), byte_tokenizer()
    assert isinstance(engine.backend, TransformersBackend)
    found = [one.text for one in engine.generate(PROMPTS, 16)]
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = engine.model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert text == tokenizer.decode(expected[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Mamba", "MambaForCausalLM keeps a state instead of keys and values, as state-space models do; generate with"),
        ("BERT", "BertLMHeadModel returns no keys and values for transformers' cache, as an encoder does; generate"),
        (
            "OpenAI GPT",
            "OpenAIGPTLMHeadModel cannot reuse keys and values: transformers' code of it takes no cache; generate",
        ),
    ],
)
def test_a_model_that_does_not_use_the_cache_is_refused(name: str, reason: str):
    with pytest.raises(InputError, match=reason):
        engine_of(name).generate(PROMPTS, 2)


@pytest.mark.parametrize(("name", "context"), [("BLOOM", 1 << 30), ("Llama", 1 << 17)])
def test_warming_runs_no_prompt_of_a_long_context(name: str, context: int, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(name)
    engine.backend.context = context  # BLOOM's config has none, and is taken to have 2**30
    prompts: list[int] = []
    monkeypatch.setattr(engine, "_compile", lambda prompt, *_: prompts.append(len(prompt[0])))
    engine.warm()
    assert prompts == [1, 2048]


def test_weights_that_give_nan_are_refused():
    model = tiny_model("Llama")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="own logits are NaN in torch"):
        Engine(model, byte_tokenizer())


def test_attention_without_a_head_dim_runs_through_transformers_code():
    model = tiny_model("Llama")
    for layer in model.model.layers:
        layer.self_attn.qk_dim = layer.self_attn.head_dim  # as in DeepSeek-V2
        del layer.self_attn.head_dim
    with pytest.warns(UserWarning, match="no self_attn with a head_dim"):
        assert isinstance(Engine(model, byte_tokenizer()).backend, TransformersBackend)
