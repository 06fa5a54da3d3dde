"""Digests of packed tensors in the config block: they detect damage but do not protect against an attacker."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

from semisparse.errors import CheckpointError

KEY = "digests"
"""Key of {tensor name: digest} in a layer's entry. An entry without it is written back without it."""

DIGEST_BYTES = 16

THREADS = min(8, os.cpu_count() or 1)
"""Threads that compute digests and check layers. One core digests 1 GB in some 1.5 s."""

Key = TypeVar("Key", bound=Hashable)


def digest_of(tensor: Tensor) -> str:
    """Return the BLAKE2b digest of a tensor's bytes, 16 bytes as 32 hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digests_of(tensors: Mapping[Key, Tensor]) -> dict[Key, str]:
    """Return the digest of each tensor; as many threads as there are cores compute them, 8 at most."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(digest_of, tensors.values()), strict=True))


def check_digests(name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> None:
    """Compare a layer's tensors with the digests in its entry, if it has any.

    Args:
        name: the layer's module name, for error messages.
        tensors: as stored, by name.
        entry: the layer's entry in the config block.
    Raises:
        CheckpointError: a tensor differs from its digest (the first is named), or the entry names other tensors.
    """
    declared = entry.get(KEY)
    if declared is None:
        return
    if not isinstance(declared, Mapping) or set(declared) != set(tensors):
        raise CheckpointError(f"layer {name}: its digests in config.json are not those of {', '.join(sorted(tensors))}")
    for tensor, values in tensors.items():
        digest = digest_of(values)
        if digest != declared[tensor]:
            raise CheckpointError(
                f"tensor {name}.{tensor} has the digest {digest}, config.json declares {str(declared[tensor])[:64]}: "
                "the file is damaged or was changed; fetch or write it again"
            )
