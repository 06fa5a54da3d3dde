"""Cutting text into token sequences."""

import json
import warnings
from pathlib import Path

import pytest

from semisparse.errors import InputError
from semisparse.text import token_chunks
from tests.models import byte_tokenizer

BOS = 256


def decode(chunk: list[int]) -> str:
    return byte_tokenizer().decode([token for token in chunk if token != BOS])


def test_documents_start_with_bos_and_are_cut_into_consecutive_chunks(tmp_path: Path):
    documents = ["abcdefgh", "ij", ""]
    expected = ["abc", "defg", "ij"]  # chunks of one token are dropped: "h", and the empty document's BOS
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": document}) for document in documents) + "\n\n")
    for source in (documents, file):
        chunks = token_chunks(byte_tokenizer(), source, 4)
        assert [decode(chunk) for chunk in chunks] == expected
        assert [chunk[0] == BOS for chunk in chunks] == [True, False, True]


def test_a_text_file_is_cut_as_a_whole_and_the_tail_dropped(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij\nk")
    assert [decode(chunk) for chunk in token_chunks(byte_tokenizer(), file, 4)] == ["abcd", "efgh", "ij\nk"]
    assert [decode(chunk) for chunk in token_chunks(byte_tokenizer(), file, 5)] == ["abcde", "fghij"]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0c"])
def test_only_newlines_end_a_line(separator: str, tmp_path: Path):
    """JSON may hold U+2028 and U+0085 as they are, and web text does; str.splitlines() cuts there."""
    file = tmp_path / "text.jsonl"
    documents = [f"ab{separator}cd", "ef"]
    lines = [json.dumps({"text": document}, ensure_ascii=False) for document in documents]
    file.write_bytes("\r\n".join(lines).encode())
    assert [decode(chunk) for chunk in token_chunks(byte_tokenizer(), file, 9)] == documents


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path):
    text = '{"text": "abcd"}' if name.endswith("l") else "abcd"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert decode(token_chunks(byte_tokenizer(), tmp_path / name, 4)[0]).startswith("abc")


def test_halves_of_surrogate_pairs_become_the_replacement_character(tmp_path: Path):
    file = tmp_path / "text.jsonl"
    file.write_text(r'{"text": "a\ud83db\ud83d\ude00"}')  # cut in the middle of an emoji, as scraped text is
    for source in (file, ["a\ud83db\U0001f600"]):
        assert decode(token_chunks(byte_tokenizer(), source, 20)[0]) == "a\ufffdb\U0001f600"


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, "1" * 5000], ids=["deep", "many digits"])
def test_json_that_python_does_not_read_is_named(value: str, tmp_path: Path):
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"text": "abc"}}\n{{"n": {value}, "text": "abc"}}')
    with pytest.raises(InputError, match=r"text.jsonl, line 2: expected a JSON object"):
        token_chunks(byte_tokenizer(), file, 4)


def test_documents_in_a_file_of_another_name_are_pointed_out(tmp_path: Path):
    file = tmp_path / "text.json"
    file.write_text('{"text": "abcd"}\n{"text": "efgh"}\n')
    with pytest.warns(UserWarning, match=r"text.json is read as plain text, JSON included; .* name it .jsonl"):
        token_chunks(byte_tokenizer(), file, 4)
    file.write_text('{"name": "a program that begins with an object"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token_chunks(byte_tokenizer(), file, 4)


def test_too_little_text_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="holds 0 documents"):
        token_chunks(byte_tokenizer(), [], 4)
    with pytest.raises(InputError, match="seqlen is at least 2"):
        token_chunks(byte_tokenizer(), ["abc"], 1)
