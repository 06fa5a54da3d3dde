"""Run evaluation tasks through lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse.errors import InputError

BATCH = 16
"""Maximum number of requests per forward pass, with padding; on a GPU as many of them as its memory holds."""


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Run lm-eval tasks on a model.

    Args:
        model: on its device.
        tokenizer: the model's tokenizer.
        tasks: names of lm-eval tasks, or paths of YAML task files.
    Returns:
        The numeric metrics by task.
    Raises:
        InputError: lm-eval is not installed, or does not know a task.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("tasks need lm-eval: pip install 'semisparse[eval]'") from error
    names = [task for task in tasks if not Path(task).is_file()]
    manager = TaskManager(include_defaults=bool(names))  # the defaults are thousands of files: 10 s
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(f"lm-eval knows no task {', '.join(unknown)}, and there is no such YAML file")
    batch = "auto" if model.device.type == "cuda" else BATCH
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_batch_size=BATCH)
    results = lm_eval.simple_evaluate(adapter, tasks=list(tasks), task_manager=manager)["results"]
    return {
        task: {metric: value for metric, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results.items()
    }
