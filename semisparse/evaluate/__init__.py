"""Measure a model's quality, run tasks on it, and generate text with it."""

from semisparse.evaluate.generate import Generation, generate_text
from semisparse.evaluate.perplexity import Quality, measure_quality
from semisparse.evaluate.tasks import run_tasks

__all__ = ["Generation", "Quality", "generate_text", "measure_quality", "run_tasks"]
