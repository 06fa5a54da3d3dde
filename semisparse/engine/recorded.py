"""Starting without transformers' model classes, from what an earlier start recorded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from semisparse.checkpoint import load_tokenizer, open_directory, pick_device
from semisparse.engine.bare import BareDecoder, fits, load_bare
from semisparse.engine.blueprint import Blueprint, blueprint_of, record, recorded
from semisparse.engine.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FACTS = ("all_special_ids", "chat_template", "clean_up_tokenization_spaces", "bos_token_id", "eos_token_id")
"""What a tokenizer's text depends on, beside its backend."""


def load_recorded(
    path: Path, device: str, dtype: torch.dtype | None
) -> tuple[BareDecoder, PreTrainedTokenizerBase] | None:
    """Return a directory's decoder without transformers' code, and its tokenizer; None if no start recorded it.

    Args:
        path: the model directory.
        device: as in `Engine`.
        dtype: likewise.
    Raises:
        CheckpointError: the directory is incomplete or corrupted.
    """
    target = pick_device(device)
    if target.type == "cuda" and target.index is None:  # threads that load would each take their own current GPU
        target = torch.device("cuda", torch.cuda.current_device())
    found = recorded(path, target, dtype)
    if found is None:
        return None
    directory = open_directory(path)
    if not fits(found, directory):
        return None
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, path, found.tokenizer_class)
        return load_bare(directory, found, target), tokenizer.result()


def record_decoder(
    path: Path,
    dtype: torch.dtype | None,
    model: PreTrainedModel,
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
) -> None:
    """Record how the next start builds a decoder, if a bare one computes the same from the same files.

    Args:
        path: the model directory.
        dtype: as in `Engine`.
        model: transformers' model of the directory, with which the decoder has been compared.
        decoder: runs it.
        tokenizer: the directory's.
        ends: tokens that end a text.
    """
    found = blueprint_of(model, decoder.structure, tokenizer, ends)
    if found and fits(found, open_directory(path)) and _same_tokenizer(path, found, tokenizer):
        record(path, dtype, found, decoder.device)


def _same_tokenizer(path: Path, blueprint: Blueprint, tokenizer: Any) -> bool:
    """Return whether the blueprint's class loads the same tokenizer from a directory as transformers did."""
    other: Any = load_tokenizer(path, blueprint.tokenizer_class)
    return (
        hasattr(tokenizer, "backend_tokenizer")
        and other.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        and all(getattr(other, name, None) == getattr(tokenizer, name, None) for name in TOKENIZER_FACTS)
    )
