"""The GPU kernels for rounded weights."""
