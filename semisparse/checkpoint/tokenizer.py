"""Loading a model directory's tokenizer. transformers is imported only then: it takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semisparse.checkpoint.config import check_sizes, read_json
from semisparse.checkpoint.files import require_directory
from semisparse.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_REMOTE_CODE = {"trust_remote_code": False}
"""Arguments with which transformers never runs Python code from a model directory."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer.

    Raises:
        CheckpointError: the directory or its tokenizer is missing, or the tokenizer is unreadable.
    """
    require_directory(Path(path))
    check_sizes(read_json(Path(path) / "config.json"), path)  # transformers reads it, too
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **NO_REMOTE_CODE)
        tokens = len(tokenizer)
    except Exception as error:  # tokenizers raises bare Exceptions on malformed files
        raise unreadable(f"cannot load the tokenizer of {path}", error) from error
    if tokens <= len(tokenizer.all_special_tokens):  # transformers makes one without words where there are no files
        raise CheckpointError(
            f"{path} has no tokenizer: copy tokenizer.json and tokenizer_config.json from where the model came"
        )
    return tokenizer


def unreadable(what: str, error: Exception) -> CheckpointError:
    """Return an error that says what cannot be read, and what was raised."""
    return CheckpointError(f"{what}: {type(error).__name__}: {error}")
