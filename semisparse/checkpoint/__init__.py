"""The directory on disk: the config block, validation, atomic writing."""

from semisparse.checkpoint.block import METHOD, VERSION, filled, read_block
from semisparse.checkpoint.directory import (
    Header,
    ModelDirectory,
    check_headers,
    open_directory,
    read_ahead,
    read_headers,
)
from semisparse.checkpoint.inspect import inspect_directory
from semisparse.checkpoint.loading import (
    NO_OWN_CODE,
    load_dense,
    load_model,
    load_tokenizer,
    pick_device,
    refuse_other_code,
)
from semisparse.checkpoint.write import refuse_existing, whole_directory

__all__ = [
    "METHOD",
    "NO_OWN_CODE",
    "VERSION",
    "Header",
    "ModelDirectory",
    "check_headers",
    "filled",
    "inspect_directory",
    "load_dense",
    "load_model",
    "load_tokenizer",
    "open_directory",
    "pick_device",
    "read_ahead",
    "read_block",
    "read_headers",
    "refuse_existing",
    "refuse_other_code",
    "whole_directory",
]
