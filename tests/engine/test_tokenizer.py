"""A recorded tokenizer gives what transformers' gives, or is not recorded."""

from pathlib import Path

import pytest

from semisparse.checkpoint import load_tokenizer
from semisparse.engine import Engine
from semisparse.engine.decoder import Decoder
from semisparse.engine.recorded import load_recorded, record_decoder
from semisparse.engine.tokenizer import RecordedTokenizer, recorded_form
from semisparse.errors import InputError
from tests.models import SHARED, byte_tokenizer, random_model


@pytest.mark.skipif(not SHARED.is_dir(), reason="real models are in ../shared: it is absent")
@pytest.mark.parametrize("name", ["babyllama-1m", "pycode-11m", "stories260k"])
def test_real_tokenizers_are_recorded(name: str):
    path = SHARED / "models" / name
    tokenizer = load_tokenizer(path)
    recorded = recorded_form(tokenizer, path)
    assert recorded is not None
    own, text = RecordedTokenizer(recorded, path), 'Tom said: "it\'s  late" <s>\n\tdef f(x): return x  # ünï'
    for special in (True, False):
        tokens = tokenizer(text, add_special_tokens=special).input_ids
        assert own(text, add_special_tokens=special).input_ids == tokens
        assert own.decode(tokens, skip_special_tokens=special) == tokenizer.decode(tokens, skip_special_tokens=special)


def test_a_tokenizer_that_does_more_is_not_recorded(tmp_path: Path):
    tokenizer = byte_tokenizer()
    assert recorded_form(tokenizer, tmp_path) is not None

    class Strips(type(tokenizer)):
        def decode(self, *arguments, **options):
            return super().decode(*arguments, **options).strip()

    class AddsToken(type(tokenizer)):
        def __call__(self, text, **options):
            return super().__call__(text + "!", **options)

    for kind in (Strips, AddsToken):
        assert recorded_form(kind(tokenizer_object=tokenizer.backend_tokenizer), tmp_path) is None


def test_truncation_that_a_caller_set_is_not_recorded(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer("a long text", truncation=True, max_length=4)
    recorded = recorded_form(tokenizer, tmp_path)
    assert recorded is not None
    assert len(RecordedTokenizer(recorded, tmp_path)("a long text").input_ids) == len("a long text")


def test_conversations_have_the_template_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    random_model("llama", head_dim=8).save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    Engine(tmp_path / "model", device="cpu", bare=True)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(InputError, match="no chat template"):
        Engine(tmp_path / "model", device="cpu", bare=True).chat_prompt(messages)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    for _ in range(2):
        engine = Engine(tmp_path / "model", device="cpu", bare=True)
        assert engine.chat_prompt(messages) == "[user] hello"
    assert isinstance(engine.tokenizer, RecordedTokenizer)


@pytest.mark.parametrize("changed", ["added_tokens.json", "vocab.json", "tokenizer.model"])
def test_another_tokenizer_is_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    random_model("llama", head_dim=8).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    Engine(model, device="cpu", bare=True)
    assert isinstance(Engine(model, device="cpu", bare=True).tokenizer, RecordedTokenizer)
    (model / changed).write_text("{}")
    assert load_recorded(model, "cpu", None) is None


def test_a_tokenizer_without_its_file_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    network, tokenizer = random_model("llama", head_dim=8), byte_tokenizer()
    network.save_pretrained(model)
    tokenizer.save_pretrained(model)
    (model / "tokenizer.json").unlink()
    decoder = Decoder(network.eval(), 16)
    record_decoder(model, None, network, decoder, tokenizer, {0})
    assert load_recorded(model, "cpu", None) is None
