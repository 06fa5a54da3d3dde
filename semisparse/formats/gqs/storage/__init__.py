"""The layout of format ``gqs``, on disk and on every device."""
