"""The CUDA kernels of vector_nm and their schedules."""
