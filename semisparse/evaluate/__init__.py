"""Measuring what a model loses."""

from semisparse.evaluate.perplexity import Quality, measure_quality

__all__ = ["Quality", "measure_quality"]
