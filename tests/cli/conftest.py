"""A tiny model directory with its text."""

from pathlib import Path

import pytest

import semisparse
from tests.models import byte_tokenizer, random_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, compressed once per file of tests."""
    out = tmp_path_factory.mktemp("compressed") / "small"
    settings = ("search=none", "prune=magnitude")
    semisparse.compress(random_model("llama"), byte_tokenizer(), "rheosparse", None, out, settings=settings)
    return out


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A model of four decoder layers."""
    random_model("llama", num_hidden_layers=4).save_pretrained(tmp_path / "deep")
    byte_tokenizer().save_pretrained(tmp_path / "deep")
    return tmp_path / "deep"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of the text\n" for i in range(200)))
    return file
