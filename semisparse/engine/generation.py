"""The continuation of a prompt: while it grows, and what `Engine.generate` returns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from semisparse.engine.text import TextStream

OnText = Callable[[int, str], None]
"""Called with a prompt's index and each new piece of its continuation."""


@dataclass(frozen=True)
class Generation:
    """A prompt's continuation.

    Args:
        text: the prompt and its continuation.
        new_tokens: tokens generated, an end token included.
        seconds: wall time of the whole batch, without loading, compiling and capturing.
        first_token_seconds: the part of ``seconds`` until the first new token.
        decode_seconds: the part of ``seconds`` after it.
        load_seconds: time to load the models to the device.
        compile_seconds: time to compile and capture before ``seconds`` begin; in an engine's first batch also to
            compare the engine's logits with those of the model's own code.
    """

    text: str
    new_tokens: int
    seconds: float
    first_token_seconds: float
    decode_seconds: float
    load_seconds: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens after the first, per second of ``decode_seconds``; None if there is only one."""
        return (self.new_tokens - 1) / max(self.decode_seconds, 1e-9) if self.new_tokens > 1 else None


class Continuation:
    """A prompt's continuation while it grows.

    Args:
        stream: decodes its tokens to text.
        end_tokens: the tokens that end it; one counts as a new token.
        on_text: called with each new piece of text.
    """

    def __init__(
        self, stream: TextStream, end_tokens: Collection[int], on_text: Callable[[str], object] | None = None
    ) -> None:
        self._stream, self._end_tokens, self._on_text = stream, end_tokens, on_text
        self.new_tokens = 0
        self.done = False

    def add(self, token: int) -> None:
        """Add a token, unless the continuation has ended."""
        if self.done:
            return
        self.new_tokens += 1
        self._call(self._stream.add(token))
        self.done = self._stream.stopped or token in self._end_tokens

    def finish(self) -> str:
        """Return the whole text."""
        self._call(self._stream.finish())
        return self._stream.text

    def _call(self, text: str) -> None:
        if text and self._on_text:
            self._on_text(text)
