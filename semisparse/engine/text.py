"""Decoding a stream of tokens to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "�"
"""What tokenizers decode an incomplete UTF-8 sequence to."""


class TextStream:
    """The text of a growing sequence of tokens.

    Args:
        decode: converts tokens to text.
        prompt: tokens before the text; with some tokenizers a token's text depends on those before it.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, [text for text in stop if text]
        self._tokens = list(prompt)
        self._start = len(prompt)
        self._text = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """The new text so far, without an end that may still become a stop string."""
        return self._text

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self._tokens.append(token)
        return self._grow(final=False)

    def finish(self) -> str:
        """Return the rest of the text: what `add` held back, a possible start of a stop string or of a character."""
        return self._grow(final=True)

    def _grow(self, final: bool) -> str:
        if self.stopped:
            return ""
        before = self._decode(self._tokens[: self._start])
        text = self._decode(self._tokens)[len(before) :]
        for stop in self._stop:
            begin = text.find(stop)
            if begin >= 0:
                text, self.stopped = text[:begin], True
        if not (final or self.stopped):
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - self._held(text)]
        fresh = text[len(self._text) :]
        self._text = text if len(text) > len(self._text) else self._text
        return fresh

    def _held(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string, but not all of it."""
        lengths = [length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length])]
        return max(lengths, default=0)
