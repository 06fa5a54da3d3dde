"""The CUDA kernels of ec_csr that read row panels."""
