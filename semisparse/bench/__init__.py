"""Benchmarks of kernels and models, and predictions of speed-ups by the roofline model."""
