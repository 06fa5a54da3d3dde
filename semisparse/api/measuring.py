"""Measuring a model directory's quality on a text and on lm-eval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from semisparse.api.loading import load
from semisparse.api.sequences import Text, sequence_length
from semisparse.checkpoint import load_tokenizer
from semisparse.errors import InputError
from semisparse.evaluate import measure_quality, run_tasks
from semisparse.text import token_chunks

ChunkProgress = Callable[[int, int], None]
"""Called with (chunks scored, all chunks)."""


@torch.no_grad()
def evaluate(
    model: str | Path,
    baseline: str | Path | None = None,
    text: Text | None = None,
    *,
    seqlen: int | None = None,
    tasks: Sequence[str] = (),
    progress: ChunkProgress | None = None,
) -> dict[str, Any]:
    """Measure a model's loss on a text, the divergence KL(baseline || model), and its scores on lm-eval tasks.

    Args:
        model: a dense or compressed model directory.
        baseline: the dense model's directory, for the KL divergence; not read without a text.
        text: a text file or documents. `token_chunks` splits them into chunks.
        seqlen: tokens per chunk; by default the model's context, 2048 at most.
        tasks: names of lm-eval tasks, or YAML files that define tasks.
        progress: called with (chunks scored, all chunks).
    Returns:
        A dictionary. With a text: ``nll`` (nats per token), ``perplexity``, ``tokens`` and ``kl`` (nats per token, None
        without a baseline). With tasks: ``tasks``, the numeric metrics of lm-eval by task.
    Raises:
        InputError: there is neither text nor task, or an input is invalid.
    """
    if text is None and not tasks:
        raise InputError("nothing to measure: give a text (--text FILE), tasks (--tasks NAMES) or both")
    loaded, tokenizer = load(model), load_tokenizer(model)
    report: dict[str, Any] = {}
    if text is not None:
        chunks = token_chunks(tokenizer, text, sequence_length(loaded, seqlen))
        dense = None if baseline is None else load(baseline)
        vocabularies = [m.config.get_text_config().vocab_size for m in (dense, loaded) if m is not None]
        if len(set(vocabularies)) > 1:
            raise InputError(
                f"the baseline has {vocabularies[0]} tokens, the model {vocabularies[1]}: they must share a vocabulary"
            )
        quality = measure_quality(loaded, chunks, dense, progress=progress)
        report |= asdict(quality) | {"perplexity": quality.perplexity}
    if tasks:
        report["tasks"] = run_tasks(loaded, tokenizer, tasks)
    return report
