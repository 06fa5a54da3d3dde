"""The output directory of a compression, and the job directory ``<out>.partial`` with its unfinished work."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse import checkpoint
from semisparse.api.sequences import sequence_length
from semisparse.checkpoint.write import flushing
from semisparse.errors import InputError, SemisparseError
from semisparse.integrations.transformers import add_dense_digests

REFUSED = "refused"
"""Folder in a job directory for a model that was written but does not load again."""

CHECKED_TOKENS = 8
"""Length of the prompt on which a written model is compared with the one in memory, if its context is not shorter."""

WEIGHTS_AND_CODE = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".py", ".pyc")
)
"""Suffixes of files with weights, which the compressed model replaces, and of code, which semisparse never runs."""

CHAT_TEMPLATES = "additional_chat_templates"
"""The one folder that belongs to a tokenizer."""


def finished_block(out: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the config block of ``out`` if an earlier process has finished this run; else None.

    If one has, the run's job directory is deleted.

    Args:
        out: the output directory.
        identity: the run's `fingerprint`.
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
            _remove_half_written(job)
            try:
                yield job
            except BaseException:
                if not any(job.rglob("*.safetensors")):  # no piece of work is finished: nothing to resume
                    shutil.rmtree(job, ignore_errors=True)
                raise
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it or choose another --out") from error
    except OSError as error:
        raise SemisparseError(f"cannot write {job}: {error}") from error


def _remove_half_written(job: Path) -> None:
    """Remove what a process that was killed left of the files that it was writing: a model has gigabytes of them.

    Files and directories are written under names that begin with a dot, and then renamed.
    """
    for leftover in job.glob(".*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out: Path, job: Path
) -> None:
    """Write a compressed model and its files to ``out``, atomically, if the loaded files equal the model in memory.

    Args:
        model: the compressed model.
        tokenizer: saved if there is no ``source``.
        source: the dense model's directory, whose other files are copied; None if the model was given in memory.
        out: the output directory.
        job: its job directory. Files are written there first, so that a killed run leaves no partial model. A model
            that does not load again stays there, in the folder `REFUSED`.

    Raises:
        SemisparseError: the written model does not load again, or computes other logits than the one in memory.
    """
    with checkpoint.atomic_directory(out, scratch_parent=job) as scratch:
        model.save_pretrained(scratch)
        add_dense_digests(model, scratch)
        if source is not None:
            copy_other_files(source, scratch)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        try:
            with flushing(scratch):
                check_written(scratch, model)
        except SemisparseError as error:
            shutil.rmtree(job / REFUSED, ignore_errors=True)
            scratch.rename(job / REFUSED)
            raise SemisparseError(f"{error}; it is left in {job / REFUSED}") from error


def check_written(written: Path, model: PreTrainedModel) -> None:
    """Load a written model as its user would, and compare its logits on a short prompt with those of the model.

    Args:
        written: the directory.
        model: the compressed model that was written.

    Raises:
        SemisparseError: the model does not run, the directory does not load, or the logits differ.
    """
    try:
        expected = _short_logits(model)
    except Exception as error:
        raise SemisparseError(f"the compressed model does not run: {type(error).__name__}: {error}") from error
    try:
        reloaded = _short_logits(checkpoint.load_model(written, model.device.type, model.dtype))
    except Exception as error:
        raise SemisparseError(f"the compressed model does not load again: {error}") from error
    difference = float((reloaded - expected).abs().max()) if reloaded.shape == expected.shape else math.inf
    if not torch.allclose(reloaded, expected, rtol=0, atol=_tolerance(expected, model.dtype), equal_nan=True):
        raise SemisparseError(
            f"the compressed model, when loaded again, computes logits that differ by {difference:.3g} from those in "
            f"memory, which reach {float(expected.abs().max()):.3g}"
        )


@torch.no_grad()
def _short_logits(model: PreTrainedModel) -> Tensor:
    """Return the logits of the first tokens of the vocabulary, [tokens, vocabulary] float32; a small one repeats."""
    training, vocabulary = model.training, model.get_input_embeddings().weight.shape[0]
    count = min(CHECKED_TOKENS, sequence_length(model, None))
    tokens = torch.arange(count, device=model.device)[None] % vocabulary
    logits = model.eval()(tokens, use_cache=False).logits[0].float()
    model.train(training)
    return logits


def _tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """Return the tolerated difference: attention may run another kernel in the loaded model, with other rounding."""
    largest = float(logits.nan_to_num(0).abs().max())
    return largest * (1e-4 if dtype == torch.float32 else 2e-2)


def copy_other_files(source: Path, out: Path) -> None:
    """Copy what a model directory has beside the model: tokenizer, processor, chat templates, licence.

    Weights, code, hidden files and what ``out`` has already are left out.
    """
    files = [*source.iterdir(), *source.glob(f"{CHAT_TEMPLATES}/*.jinja")]
    for file in files:
        target = out / file.relative_to(source)
        unwanted = file.name.startswith(".") or not WEIGHTS_AND_CODE.isdisjoint(file.suffixes)
        if file.is_file() and not unwanted and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _job_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")
