"""Cutting text into token sequences."""

import json
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


def test_too_little_text_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="holds 0 documents"):
        token_chunks(byte_tokenizer(), [], 4)
    with pytest.raises(InputError, match="seqlen is at least 2"):
        token_chunks(byte_tokenizer(), ["abc"], 1)
