"""The CUDA kernels of ec_csr: those that read row panels or mask tiles, and those that make or check them."""
