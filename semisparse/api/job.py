"""The output directory of a compression, and the job directory ``<out>.partial`` with its unfinished work."""

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


def finished_block(out: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the config block of ``out`` if an earlier process has finished this run; else None.

    Args:
        out: the output directory.
        identity: the run's fingerprint: model, calibration tokens, recipe, seed.
    """
    if not (out / "config.json").is_file():
        return None
    block = checkpoint.open_directory(out).config.get("quantization_config", {})
    if block.get("origin") != identity:
        return None
    shutil.rmtree(_job_path(out), ignore_errors=True)
    return block


@contextmanager
def job_directory(out: Path, resume: bool) -> Iterator[Path]:
    """Yield the job directory of ``out``, locked against other processes; removed if a failure leaves no work in it.

    Args:
        out: the output directory.
        resume: whether the job directory may contain unfinished work.
    Raises:
        InputError: another process holds the lock, or there is unfinished work and ``resume`` is false.
        SemisparseError: the job directory cannot be written.
    """
    job = _job_path(out)
    unfinished = job.is_dir() and not resume
    try:
        job.mkdir(parents=True, exist_ok=True)
        with FileLock(job / "lock", timeout=0):
            if unfinished:
                raise InputError(f"{job} holds an unfinished run; go on with --resume, or delete it")
            try:
                yield job
            except BaseException:
                if not any(job.glob("*.safetensors")):  # no piece of work is finished: nothing to resume
                    shutil.rmtree(job, ignore_errors=True)
                raise
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it or choose another --out") from error
    except OSError as error:
        raise SemisparseError(f"cannot write {job}: {error}") from error


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out: Path, job: Path
) -> None:
    """Write a compressed model and its tokenizer to ``out``, atomically.

    Args:
        model: the compressed model.
        tokenizer: saved if there is no ``source``.
        source: the dense model's directory, whose tokenizer files are copied; None if the model was given in memory.
        out: the output directory.
        job: its job directory. Files are written there first, so that a killed run leaves no partial model.
    """
    with checkpoint.atomic_directory(out, scratch_parent=job) as scratch:
        model.save_pretrained(scratch)
        if source is not None:
            copy_tokenizer(source, scratch)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy a model directory's tokenizer files to another directory."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _job_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")
