"""Starting without transformers, from what an earlier start recorded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from semisparse.checkpoint import open_directory, pick_device
from semisparse.checkpoint.files import require_directory
from semisparse.engine.bare import BareDecoder, fits, load_bare
from semisparse.engine.blueprint import blueprint_of, record, recorded
from semisparse.engine.decoder import Decoder
from semisparse.engine.tokenizer import RecordedTokenizer, recorded_form

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_recorded(path: Path, device: str, dtype: torch.dtype | None) -> tuple[BareDecoder, RecordedTokenizer] | None:
    """Return a directory's decoder without transformers' code, and its tokenizer; None if no start recorded it.

    Args:
        path: the model directory.
        device: as in `Engine`.
        dtype: likewise.
    Raises:
        CheckpointError: the directory is incomplete or corrupted.
    """
    require_directory(path)
    target = pick_device(device)
    if target.type == "cuda" and target.index is None:  # threads that load would each take their own current GPU
        target = torch.device("cuda", torch.cuda.current_device())
    blueprint = recorded(path, target, dtype)
    if blueprint is None:
        return None
    directory = open_directory(path)
    if not fits(blueprint, directory):
        return None
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(RecordedTokenizer, blueprint.tokenizer, path)
        return load_bare(directory, blueprint, target), tokenizer.result()


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
    form = recorded_form(tokenizer, path) if (path / "tokenizer.json").exists() else None
    blueprint = None if form is None else blueprint_of(model, decoder.structure, form, ends)
    if blueprint is not None and fits(blueprint, open_directory(path)):
        record(path, dtype, blueprint, decoder.device)
