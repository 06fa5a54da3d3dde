"""Where a weight lies: on disk, on a GPU, and the checks of both."""
