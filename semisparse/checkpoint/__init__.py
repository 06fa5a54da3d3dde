"""The model directory on disk: its config block, validation, loading and atomic writing.

Names are imported when they are first used: loading.py imports transformers, file_layers.py not even torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semisparse.lazy import lazy

if TYPE_CHECKING:
    from semisparse.checkpoint.block import METHOD, VERSION, packed_from_tensors, read_block
    from semisparse.checkpoint.config import check_sizes, refuse_integers, refuse_unstored
    from semisparse.checkpoint.device import pick_device
    from semisparse.checkpoint.digests import digests_of
    from semisparse.checkpoint.directory import (
        Header,
        ModelDirectory,
        check_headers,
        open_directory,
        open_files,
        read_headers,
    )
    from semisparse.checkpoint.file_layers import DIGESTS, is_blake2b
    from semisparse.checkpoint.files import read_ahead
    from semisparse.checkpoint.inspect import describe, layer_bytes_on
    from semisparse.checkpoint.loading import (
        NO_REMOTE_CODE,
        auto_class,
        is_encoder,
        load_dense,
        load_model,
        load_tokenizer,
        meta_model,
        read_config,
        refuse_remote_code,
    )
    from semisparse.checkpoint.placement import placed_on, placement
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
    "describe",
    "digests_of",
    "is_blake2b",
    "is_encoder",
    "layer_bytes_on",
    "load_dense",
    "load_model",
    "load_tokenizer",
    "meta_model",
    "open_directory",
    "open_files",
    "packed_from_tensors",
    "pick_device",
    "placed_on",
    "placement",
    "read_ahead",
    "read_block",
    "read_config",
    "read_headers",
    "refuse_existing",
    "refuse_integers",
    "refuse_remote_code",
    "refuse_unstored",
]

HOMES = {
    **dict.fromkeys(("METHOD", "VERSION", "packed_from_tensors", "read_block"), "block"),
    **dict.fromkeys(("check_sizes", "refuse_integers", "refuse_unstored"), "config"),
    **dict.fromkeys(("Header", "ModelDirectory", "check_headers", "open_directory"), "directory"),
    **dict.fromkeys(("open_files", "read_headers"), "directory"),
    **dict.fromkeys(("NO_REMOTE_CODE", "auto_class", "load_dense", "load_model", "load_tokenizer"), "loading"),
    **dict.fromkeys(("is_encoder", "meta_model", "read_config", "refuse_remote_code"), "loading"),
    **dict.fromkeys(("DIGESTS", "is_blake2b"), "file_layers"),
    **dict.fromkeys(("placed_on", "placement"), "placement"),
    **dict.fromkeys(("atomic_directory", "refuse_existing"), "write"),
    "pick_device": "device",
    "describe": "inspect",
    "digests_of": "digests",
    "layer_bytes_on": "inspect",
    "read_ahead": "files",
}
"""The module of each name."""

__getattr__, __dir__ = lazy(__name__, {name: f".{module}" for name, module in HOMES.items()})
