"""The layouts of stored weights, on disk and on a GPU, and their checks."""
