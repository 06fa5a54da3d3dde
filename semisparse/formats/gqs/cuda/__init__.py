"""CUDA kernels of format ``gqs``."""
