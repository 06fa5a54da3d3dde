"""A stream of tokens as text: each token's text at once, except what may still become a stop string or a character."""

from collections.abc import Sequence

from semisparse.engine.text import TextStream


def decoded(tokens: Sequence[int]) -> str:
    """A tokenizer of one token per byte."""
    return bytes(tokens).decode(errors="replace")


def parts_of(stream: TextStream, text: str) -> list[str]:
    """Return what each byte of a text adds to the stream, and what its end adds."""
    return [*(stream.add(token) for token in text.encode()), stream.finish()]


def test_a_token_s_text_comes_at_once():
    assert parts_of(TextStream(decoded, b"prompt"), "abc") == ["a", "b", "c", ""]
    assert parts_of(TextStream(decoded, b"prompt", ["xyz"]), "abc") == ["a", "b", "c", ""]


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(decoded, b"prompt", ["bcd", "q"])
    assert parts_of(stream, "abcab") == ["a", "", "", "bca", "", "b"]
    assert (stream.text, stream.stopped) == ("abcab", False)


def test_a_stop_string_ends_the_text():
    stream = TextStream(decoded, b"prompt", ["bcd"])
    assert parts_of(stream, "abcde") == ["a", "", "", "", "", ""]
    assert (stream.text, stream.stopped) == ("a", True)


def test_a_character_of_several_tokens_comes_whole():
    text = "é中🙂"
    assert [part for part in parts_of(TextStream(decoded, []), text) if part] == list(text)
