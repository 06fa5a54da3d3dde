"""The directory that a compression writes: unfinished work beside it, itself whole or absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse import checkpoint
from semisparse.errors import InputError, SemisparseError

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def finished_before(out: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """Give the config block of an ``out`` that this very run has written already, before it was killed."""
    if not (out / "config.json").is_file():
        return None
    block = checkpoint.open_directory(out).config.get("quantization_config", {})
    if block.get("origin") != identity:
        return None
    shutil.rmtree(_job_path(out), ignore_errors=True)
    return block


@contextmanager
def unfinished_work(out: Path, resume: bool) -> Iterator[Path]:
    """Hold the directory of unfinished work, alone.

    Raises:
        InputError: another run holds it, or there is unfinished work and ``resume`` is off.
    """
    job = _job_path(out)
    unfinished = job.is_dir() and not resume
    try:
        job.mkdir(parents=True, exist_ok=True)
        with FileLock(job / "lock", timeout=0):
            if unfinished:
                raise InputError(f"{job} holds an unfinished run; go on with --resume, or delete it")
            yield job
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it or choose another --out") from error
    except OSError as error:
        raise SemisparseError(f"cannot write {job}: {error}") from error


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out: Path, job: Path
) -> None:
    """Write the checkpoint, prepared among the unfinished work: a kill leaves nothing that looks like a model."""
    with checkpoint.whole_directory(out, workplace=job) as scratch:
        model.save_pretrained(scratch)
        if source is not None:
            for name in TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, scratch / name)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)


def _job_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")
