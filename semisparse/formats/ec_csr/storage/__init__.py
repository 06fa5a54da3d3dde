"""The stored tensors of ec_csr: on disk, on a GPU, their checks, and stacking."""
