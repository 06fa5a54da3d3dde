"""How a vector_nm weight is stored: on disk, on a GPU, and the checks of both."""
