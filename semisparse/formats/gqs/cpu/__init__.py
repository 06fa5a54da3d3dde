"""CPU kernels of format ``gqs``."""
