"""The bytes of a slide24 weight, on disk and on a GPU."""
