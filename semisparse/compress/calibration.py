"""Calibration samples: token ids cut from text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.errors import InputError

BATCH_TOKENS = 4096
"""Tokens run through a block at once."""


def calibration_batches(
    tokenizer: Any, text: str | Path | Sequence[str], *, samples: int, seqlen: int, seed: int
) -> list[Tensor]:
    """Draw calibration samples from text, those of equal length in one batch.

    Args:
        tokenizer: a transformers tokenizer.
        text: path of a ``.txt`` file, whose text is cut into chunks of exactly `seqlen`; or of a ``.jsonl`` file with a
            document in each line's ``text``, or a list of documents: each starts with the tokenizer's BOS and is cut
            into consecutive chunks of at most `seqlen`.
        samples: chunks drawn; all of them where the text holds fewer.
        seqlen: tokens.
        seed: of the drawing.
    Returns:
        token ids, each [batch, tokens] int64.

    Raises:
        InputError: the text cannot be read, or holds less than one chunk.
    """
    if samples < 1 or seqlen < 2:
        raise InputError(f"calibration needs at least 1 sample of 2 tokens, got {samples} of {seqlen}")
    if isinstance(text, str | Path):
        path = Path(text)
        if path.suffix not in (".txt", ".jsonl"):
            raise InputError(f"calibration text {path} is neither a .txt nor a .jsonl file")
        what, content = str(path), _read(path)
        chunks = (
            _cut_text(tokenizer, content, seqlen)
            if path.suffix == ".txt"
            else _cut_documents(tokenizer, _documents(path, content), seqlen)
        )
    else:
        what, chunks = "the calibration text", _cut_documents(tokenizer, text, seqlen)
    if not chunks:
        raise InputError(f"{what} is shorter than one sample of {seqlen} tokens; give more text or a smaller seqlen")
    return _batches(random.Random(seed).sample(chunks, min(samples, len(chunks))))


def check_batches(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Raise unless the model can run the batches.

    Raises:
        InputError: there is none, one is longer than the model's context, or a token is not in its vocabulary.
    """
    if not batches:
        raise InputError("compression needs calibration text; it is used to decide which weights to keep")
    longest = max(batch.shape[1] for batch in batches)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise InputError(f"calibration samples of {longest} tokens exceed the model's context of {context}")
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    largest = max(int(batch.max()) for batch in batches)
    if largest >= vocabulary:
        raise InputError(f"token {largest} is not in the model's vocabulary of {vocabulary}; is this its tokenizer?")


def _read(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the calibration text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"calibration text {path} is not UTF-8: byte {error.start} cannot be decoded") from error
    if not content.strip():
        raise InputError(f"calibration text {path} is empty")
    return content


def _documents(path: Path, content: str) -> list[str]:
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error.msg}") from error
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise InputError(f'{path}, line {number} is not an object with a string "text"')
        documents.append(document["text"])
    return documents


def _cut_text(tokenizer: Any, content: str, seqlen: int) -> list[list[int]]:
    tokens = _encode(tokenizer, content)
    return [tokens[start : start + seqlen] for start in range(0, len(tokens) - seqlen + 1, seqlen)]


def _cut_documents(tokenizer: Any, documents: Iterable[str], seqlen: int) -> list[list[int]]:
    """Cut each document; a last chunk of one token predicts nothing and is left out."""
    chunks = []
    for document in documents:
        tokens = _encode(tokenizer, document)
        bos = tokenizer.bos_token_id
        if bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        chunks += [tokens[start : start + seqlen] for start in range(0, len(tokens) - 1, seqlen)]
    return chunks


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _batches(chunks: Iterable[list[int]]) -> list[Tensor]:
    by_length: dict[int, list[list[int]]] = {}
    for chunk in chunks:
        by_length.setdefault(len(chunk), []).append(chunk)
    batches = []
    for length, alike in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // length)
        batches += [torch.tensor(alike[start : start + size]) for start in range(0, len(alike), size)]
    return batches
