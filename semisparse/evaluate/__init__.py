"""Measure a model's quality on a text, and run lm-eval tasks on it."""

from semisparse.evaluate.perplexity import Quality, measure_quality
from semisparse.evaluate.tasks import run_tasks

__all__ = ["Quality", "measure_quality", "run_tasks"]
