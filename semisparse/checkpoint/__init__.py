"""The model directory on disk: its config block, validation, loading and atomic writing."""

from semisparse.checkpoint.block import METHOD, VERSION, packed_from_tensors, read_block
from semisparse.checkpoint.directory import (
    Header,
    ModelDirectory,
    check_headers,
    open_directory,
    open_files,
    read_ahead,
    read_headers,
)
from semisparse.checkpoint.inspect import inspect_directory
from semisparse.checkpoint.loading import (
    NO_REMOTE_CODE,
    auto_class,
    load_dense,
    load_model,
    load_tokenizer,
    pick_device,
    refuse_remote_code,
)
from semisparse.checkpoint.write import atomic_directory, refuse_existing

__all__ = [
    "METHOD",
    "NO_REMOTE_CODE",
    "VERSION",
    "Header",
    "ModelDirectory",
    "atomic_directory",
    "auto_class",
    "check_headers",
    "inspect_directory",
    "load_dense",
    "load_model",
    "load_tokenizer",
    "open_directory",
    "open_files",
    "packed_from_tensors",
    "pick_device",
    "read_ahead",
    "read_block",
    "read_headers",
    "refuse_existing",
    "refuse_remote_code",
]
