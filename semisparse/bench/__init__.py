"""Measuring kernels and models, and predicting what sparsity gains before anything is compressed."""
