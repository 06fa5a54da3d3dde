"""Cut text into token sequences, in the same way for calibration and for evaluation."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from semisparse.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_chunks(
    tokenizer: PreTrainedTokenizerBase, source: str | Path | Sequence[str], seqlen: int
) -> list[list[int]]:
    """Cut a text into chunks of at most ``seqlen`` tokens.

    A ``.jsonl`` file (one document per line, under the key ``text``) and a sequence of strings hold documents. Each
    document starts with the tokenizer's BOS, if it has one; a long document is cut into consecutive chunks. Any other
    file is one text: it is tokenised as a whole and cut into chunks of exactly ``seqlen``; the tail is dropped.
    A byte-order mark is no part of a text. Halves of surrogate pairs, which no tokenizer takes, become U+FFFD.

    Args:
        tokenizer: the model's tokenizer.
        source: path of a file, or documents.
        seqlen: maximum number of tokens per chunk, at least 2.
    Returns:
        One or more chunks of 2 to ``seqlen`` token ids.
    Raises:
        InputError: the file is missing, empty, not UTF-8 or not JSON lines; there is no chunk; ``seqlen`` is below 2.
    """
    if seqlen < 2:
        raise InputError(f"a sequence of {seqlen} tokens predicts nothing; seqlen is at least 2")
    name = str(source) if isinstance(source, str | Path) else "the given text"
    if isinstance(source, str | Path) and Path(source).suffix != ".jsonl":
        text = _read(Path(source))
        if _is_document(text.lstrip().split("\n", 1)[0]):
            warnings.warn(
                f"{name} is read as plain text, JSON included; its first line is a document: name it .jsonl to "
                "read one document per line",
                stacklevel=2,
            )
        ids = _encode(tokenizer, [text])[0]
        chunks = [ids[i : i + seqlen] for i in range(0, len(ids) - seqlen + 1, seqlen)]
        length = f"{len(ids)} tokens"
    else:
        documents = _documents(Path(source)) if isinstance(source, str | Path) else list(source)
        other = next((document for document in documents if not isinstance(document, str)), "")
        if not isinstance(other, str):
            raise InputError(f"a document of {name} is {type(other).__name__}, expected strings: one per document")
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        chunks = []
        for encoded in _encode(tokenizer, documents):
            ids = bos + encoded
            chunks += [ids[i : i + seqlen] for i in range(0, len(ids), seqlen) if len(ids) - i >= 2]
        length = f"{len(documents)} documents"
    if not chunks:
        raise InputError(
            f"{name} holds {length}: too little for one sequence of {seqlen} tokens; "
            "give a longer text, or a smaller --seqlen"
        )
    return chunks


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    # verbose=False: no warning that the text is longer than the model's context.
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte-order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not text.strip():
        raise InputError(f"{path} is empty; give a file with text")
    return text


def _is_document(line: str) -> bool:
    """Return whether a line is a JSON object with ``text``."""
    try:
        return line.startswith("{") and isinstance(json.loads(line)["text"], str)
    except (ValueError, KeyError, RecursionError):
        return False


def _documents(path: Path) -> list[str]:
    documents = []
    for number, line in enumerate(_read(path).split("\n"), 1):  # splitlines() also cuts at U+2028 within a text
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f'{path}, line {number}: expected a JSON object with "text", got {line[:60]!r}') from error
        if not isinstance(document, str):
            raise InputError(f'{path}, line {number}: "text" is {type(document).__name__}, expected a string')
        documents.append(document)
    return documents
