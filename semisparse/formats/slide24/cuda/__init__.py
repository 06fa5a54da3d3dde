"""The GPU kernels of slide24."""
