"""What a model directory is worth: its quality on a text and on tasks, and what it says."""

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

Counter = Callable[[int, int], None]
"""Called with (done, total)."""


@torch.no_grad()
def evaluate(
    model: str | Path,
    baseline: str | Path | None = None,
    text: Text | None = None,
    *,
    seqlen: int | None = None,
    tasks: Sequence[str] = (),
    progress: Counter | None = None,
) -> dict[str, Any]:
    """Measure a model directory on a text and on lm-eval tasks.

    Args:
        model: a dense or compressed model directory.
        baseline: the dense model, for the KL divergence.
        text: a file or documents, as `token_chunks` cuts them.
        seqlen: tokens in a chunk; by default the model's context, 2048 at most.
        tasks: names of lm-eval tasks, or YAML files of one's own.
        progress: called with (chunks done, all chunks).
    Returns:
        ``nll`` (nats a token), ``perplexity``, ``tokens`` and ``kl`` (None without a baseline) if there is a text;
        ``tasks`` if there are any.
    Raises:
        InputError: there is nothing to measure, or an input cannot be used.
    """
    if text is None and not tasks:
        raise InputError("nothing to measure: give --text FILE, --tasks NAMES or both")
    loaded, tokenizer = load(model), load_tokenizer(model)
    found: dict[str, Any] = {}
    if text is not None:
        chunks = token_chunks(tokenizer, text, sequence_length(loaded, seqlen))
        dense = None if baseline is None else load(baseline)
        if dense is not None and dense.config.vocab_size != loaded.config.vocab_size:
            raise InputError(
                f"the baseline has {dense.config.vocab_size} tokens, the model {loaded.config.vocab_size}: "
                "they must share a vocabulary"
            )
        quality = measure_quality(loaded, chunks, dense, progress=progress)
        found |= asdict(quality) | {"perplexity": quality.perplexity}
    if tasks:
        found["tasks"] = run_tasks(loaded, tokenizer, tasks)
    return found
