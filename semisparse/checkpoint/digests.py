"""Digests of packed tensors in the config block: they detect damage but do not protect against an attacker."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from semisparse.errors import CheckpointError

KEY = "digests"
"""Key of {tensor name: digest} in a layer's entry. An entry without it is written back without it."""

BLAKE2B_DIGITS = 32
"""Hexadecimal digits of the BLAKE2b digests that earlier builds wrote. Digests are now SHA-256, of 64 digits: a core
with SHA instructions computes SHA-256 of 1.8 GB per second, but BLAKE2b of 0.9 GB."""

THREADS = min(8, os.cpu_count() or 1)
"""Threads that compute digests and check layers."""

Key = TypeVar("Key", bound=Hashable)


def is_blake2b(digests: Any) -> bool:
    """Return whether an entry's digests are the BLAKE2b digests of an earlier version."""
    return isinstance(digests, Mapping) and any(len(str(digest)) == BLAKE2B_DIGITS for digest in digests.values())


def digest_of(tensor: Tensor, blake: bool = False) -> str:
    """Return the SHA-256 digest of a tensor's bytes, or its BLAKE2b digest, in hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return (blake2b(data, digest_size=BLAKE2B_DIGITS // 2) if blake else sha256(data)).hexdigest()


def digests_of(tensors: Mapping[Key, Tensor], blake: Collection[Key] = ()) -> dict[Key, str]:
    """Return the digest of each tensor, BLAKE2b for the keys in ``blake``, computed by a thread per core, up to 8."""
    with ThreadPoolExecutor(THREADS) as pool:
        computed = pool.map(lambda key: digest_of(tensors[key], key in blake), tensors)
        return dict(zip(tensors, computed, strict=True))


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
    blake = is_blake2b(declared)
    for tensor, values in tensors.items():
        digest = digest_of(values, blake)
        if digest != declared[tensor]:
            raise CheckpointError(
                f"tensor {name}.{tensor} has the digest {digest}, config.json declares {str(declared[tensor])[:64]}: "
                "the file is damaged or was changed; fetch or write it again"
            )
