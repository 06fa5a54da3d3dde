"""The GPU kernels, their schedules and their device code."""
