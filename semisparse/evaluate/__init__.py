"""Measure a model's quality, run tasks on it, and generate text with it."""

from semisparse.evaluate.perplexity import Quality, measure_quality
from semisparse.evaluate.tasks import run_tasks

__all__ = ["Quality", "measure_quality", "run_tasks"]
