"""The model directory on disk: its config block, validation, loading and atomic writing."""

from semisparse.checkpoint.block import METHOD, VERSION, packed_from_tensors, read_block
from semisparse.checkpoint.config import check_sizes, refuse_integers, refuse_unstored
from semisparse.checkpoint.digests import KEY as DIGESTS
from semisparse.checkpoint.digests import digests_of, is_blake2b
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
    meta_model,
    pick_device,
    read_config,
    refuse_remote_code,
)
from semisparse.checkpoint.write import atomic_directory, refuse_existing

__all__ = [
    "DIGESTS",
    "METHOD",
    "NO_REMOTE_CODE",
    "VERSION",
    "Header",
    "ModelDirectory",
    "atomic_directory",
    "auto_class",
    "check_headers",
    "check_sizes",
    "digests_of",
    "inspect_directory",
    "is_blake2b",
    "load_dense",
    "load_model",
    "load_tokenizer",
    "meta_model",
    "open_directory",
    "open_files",
    "packed_from_tensors",
    "pick_device",
    "read_ahead",
    "read_block",
    "read_config",
    "read_headers",
    "refuse_existing",
    "refuse_integers",
    "refuse_remote_code",
    "refuse_unstored",
]
