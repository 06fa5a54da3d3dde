"""A tokenizer without transformers' code: the part of it that turns text into tokens and back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (
    "def main(args):\n    return 0",
    "Once upon a time, there was  a little\tgirl .",
    " leading and trailing ",
    "\n\n",
    "Zürich 中文 🙂 e\u0301 don't 'tis 3.14",
    "",
)
"""Texts that a recorded tokenizer has to treat as transformers' does, beside those with its special tokens."""

DECODED_TOKENS = 512
"""The tokens 0 to this, each of which has to give the same text."""


class RecordedTokenizer:
    """Turns text into tokens and back as a directory's tokenizer does. Chat templates are left to transformers.

    Args:
        recorded: what `Tokenizer.to_str` wrote.
        path: the model directory.
    """

    def __init__(self, recorded: str, path: Path) -> None:
        self._tokenizer, self._path = Tokenizer.from_str(recorded), path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._whole: PreTrainedTokenizerBase | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        """Return the tokens of a text, as ``input_ids``."""
        return SimpleNamespace(input_ids=self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    @property
    def chat_template(self) -> Any:
        """The chat template, or None."""
        return self._transformers().chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Return a conversation as a prompt."""
        return self._transformers().apply_chat_template(messages, **options)

    def _transformers(self) -> PreTrainedTokenizerBase:
        """Return the directory's tokenizer as transformers loads it."""
        if self._whole is None:
            from semisparse.checkpoint import load_tokenizer  # imports transformers

            self._whole = load_tokenizer(self._path)
        return self._whole


def recorded_form(tokenizer: PreTrainedTokenizerBase, path: Path) -> str | None:
    """Return what a `RecordedTokenizer` is made of, or None if it would not give the same tokens and texts.

    Args:
        tokenizer: the directory's, as transformers loaded it.
        path: the model directory.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    recorded = backend.to_str()
    own = RecordedTokenizer(recorded, path)
    texts = (*PROBES, *(f"a{token} {token}b" for token in tokenizer.all_special_tokens))
    single = [[token] for token in range(min(len(tokenizer), DECODED_TOKENS))]
    for special in (True, False):
        sequences = [list(tokenizer(text, add_special_tokens=special).input_ids) for text in texts]
        if sequences != [own(text, add_special_tokens=special).input_ids for text in texts]:
            return None
        for tokens in (*sequences, *single):
            if tokenizer.decode(tokens, skip_special_tokens=special) != own.decode(tokens, special):
                return None
    return recorded
