"""A typed error that hides a wrong line of semisparse is a fault; one that wraps transformers' own exception is not."""

from pathlib import Path

import pytest

from semisparse.api import load
from semisparse.errors import CheckpointError
from tests.fuzz.outcome import SOUND, refused
from tests.fuzz.sources import write_directory


def error_of(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path, device="cpu")
    return caught.value


def test_a_programming_error_below_transformers_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_directory("whole", tmp_path)
    monkeypatch.setattr("semisparse.integrations.transformers.model_layers", lambda *_: None)
    kind, detail = refused(error_of(path))
    assert kind == "hidden TypeError"
    assert kind not in SOUND
    assert "transformers.py" in detail


def test_an_error_of_transformers_is_none(tmp_path: Path):
    path = write_directory("whole", tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": "four"'))
    assert refused(error_of(path))[0] == "refused by transformers"


def test_a_value_that_a_narrow_handler_refuses_is_none(tmp_path: Path):
    path = write_directory("whole", tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"pattern"', '"patern"', 1))
    assert refused(error_of(path))[0] == "refused"
